"""Answers from a small cache: the loop, how tokens are chosen, constraints, conversations."""
