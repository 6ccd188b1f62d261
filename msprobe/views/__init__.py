"""Answers shown: terminal pages and strict JSON. Nothing here reads a trace."""
