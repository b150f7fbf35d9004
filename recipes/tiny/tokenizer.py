"""Train the tiny tokenizer: byte-level BPE, 2,048 entries, a Qwen-like chat template.

python -m recipes.tiny.tokenizer runs/tiny/model
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipes.run import make_parser, run_recipe
from restorekv.tiny.world import KINDS, NUMBERS, draw_document

VOCABULARY = 2048
END = "<|endoftext|>"
START = "<|im_start|>"
STOP = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Ordinary words that the world never uses, so that plain English is not split into letters.
PLAIN = """
the of and to in that is was he for it with as his on be at by had not are but from or have an
they which one you were her all she there would their we him been has when who will more no if out
so said what up its about into than them can only other new some could time these two may then do
first any my now such like our over man me even most made after also did many before must through
years where much your way well down should because each just those people how too little state
good very make world still own see men work long get here between both life being under never day
same another know while last might us great old year off come since against go came right used
take three house use again place around small however found thought part give every hand
""".split()


def draw_corpus(documents: int) -> Iterator[str]:
    """Yield the texts that the merges are learned from: documents of the world with their questions
    and answers, numbers, prompts and plain words.
    """
    rng = random.Random("bundled tokenizer")  # the seed of the tokenizer that ships
    for index in range(documents):
        made = draw_document(
            rng, KINDS[index % len(KINDS)], 200, lambda s: len(s.split()) * 13 // 10, noise=0.5
        )
        yield made.text
        yield from (f"{question.text}\n{question.target}" for question in made.questions)
        yield " ".join(map(str, rng.sample(NUMBERS, 60)))
        yield (
            "Repeat the previous context exactly. "
            "Repeat the part of the previous context exactly, starting with "
        )
        yield " ".join(rng.sample(PLAIN, 40))


def train_tokenizer(documents: int = 3000) -> PreTrainedTokenizerFast:
    """Learn the merges and wrap them for transformers."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, START, STOP],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(draw_corpus(documents), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=STOP,
        pad_token=END,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def main() -> None:
    """Train the tokenizer and write it into a folder."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    run_recipe(main)
