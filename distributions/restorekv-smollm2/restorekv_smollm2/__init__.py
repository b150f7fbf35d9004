"""Data for restorekv: restore adapters and a gate for SmolLM2-135M-Instruct."""
