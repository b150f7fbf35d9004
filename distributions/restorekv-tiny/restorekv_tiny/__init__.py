"""Data for restorekv: the tiny model, its restore adapters and its gates."""
