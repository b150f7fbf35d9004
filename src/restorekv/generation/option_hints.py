"""What to write instead of options that `ask` does not have: names of other libraries, arguments of
other functions, and misspelled ones.
"""

# Arguments of `ask` itself, which are not options of sampling.
ASK_ARGUMENTS = ("max_new_tokens", "answer_prefix", "stream", "details")
# What other libraries call an option.
ALIASES = {
    "p": "top_p",
    "k": "top_k",
    "repeat_penalty": "repetition_penalty",
    "rep_penalty": "repetition_penalty",
    "random_seed": "seed",
    "random_state": "seed",
    "best_of": "samples",
    "num_samples": "samples",
    "stop_sequences": "stop",
    "stop_words": "stop",
    "top_logprobs": "logprobs",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "pattern": "regex",
}
# What other libraries call max_new_tokens, which is an argument of `ask`.
LIMIT_ALIASES = (
    "tokens",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "n_tokens",
    "num_tokens",
    "n_predict",
    "num_predict",
)
ALIAS_HINTS = {name: f"did you mean {option}?" for name, option in ALIASES.items()} | {
    "do_sample": "a temperature above 0 samples, and 0 takes the most likely token.",
    "max_length": "max_new_tokens limits the answer alone.",
    "n": "samples is the number of answers to one question.",
    "num_return_sequences": "samples is the number of answers to one question.",
    "stop_strings": "stop takes them.",
    "stopping_criteria": "criteria takes them.",
    "logits_processor": "processors takes them.",
    "no_repeat_ngram_size": "stop_repeats ends an answer that repeats itself.",
    "num_beams": "answers are written greedily or sampled, without beams.",
    "response_format": "json_schema takes the schema itself.",
    "eos_token_id": "stop ends an answer before a text; the ids are those of the model's own "
    "generation_config.",
}
# Hints for calls of `ask` and of other functions that answer.
CALL_HINTS = {
    **dict.fromkeys(LIMIT_ALIASES, "did you mean max_new_tokens?"),
    "generation_config": "config takes it.",
    "sampling_params": "config takes a SamplingConfig.",
    "system": "a system message belongs to the compressed text: CompressionConfig(system=...), or "
    "to a conversation: chat(system=...).",
    **ALIAS_HINTS,
    **{name: f"leave it out, since only ask and ask_many take {name}." for name in ASK_ARGUMENTS},
}
# Hints for making a SamplingConfig, which is later passed to `ask`.
LIMIT_HINT = "pass max_new_tokens to ask itself: ask(question, max_new_tokens=64)."
CONFIG_HINTS = {
    **{name: f"pass it to ask itself: ask(question, {name}=...)." for name in ASK_ARGUMENTS},
    **ALIAS_HINTS,
    **dict.fromkeys(("max_new_tokens", "max_length", *LIMIT_ALIASES), LIMIT_HINT),
}
