"""Evaluation over a grid: cells that can be interrupted and resumed, in this process or over a Ray
cluster.
"""
