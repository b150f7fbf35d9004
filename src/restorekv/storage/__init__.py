"""Compressed caches as files: what they hold, what is checked, and caches for other engines."""
