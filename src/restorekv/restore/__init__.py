"""The restore adapter: its mathematics, its files, and publishing it."""
