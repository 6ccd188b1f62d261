"""One verb a file; `cli` puts them together."""
