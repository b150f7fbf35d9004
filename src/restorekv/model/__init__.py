"""Everything that touches transformers: loading a model, prompts, the prefill, observers and
attention.
"""
