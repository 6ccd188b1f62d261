"""Measuring one training run with torch, knowing no ModelScope: when, how much, where, and how often."""
