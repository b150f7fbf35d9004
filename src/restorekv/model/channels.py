"""Answers in channels, as gpt-oss writes them: the model's thoughts first, then the answer in
another channel.

Each message is <|channel|>NAME<|message|>TEXT, with <|end|><|start|>assistant between two messages.
Only the text in the channel "final" belongs to the answer, and so does text in no channel, which
the model writes when it continues given first words. Without this rule, channel names and texts
would run together, because control tokens are not text.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.model.tokenize import decode_ids, find_control_tokens

START = "<|start|>"  # a role follows
CHANNEL = "<|channel|>"  # its name follows
MESSAGE = "<|message|>"  # text follows
FINAL = "final"  # the channel that users read


class ChannelReader:
    """A filter of an answer's ids, as they come one by one: it shows all of them, unless the chat
    template writes channels.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        names: dict[str, int] = {}
        if CHANNEL in str(getattr(tokenizer, "chat_template", "")):
            control = find_control_tokens(tokenizer)
            names = {name: number for number, name in control.items()}
        # Without channels, none of these ids ever comes.
        self.start = names.get(START)
        self.channel = names.get(CHANNEL)
        self.message = names.get(MESSAGE)
        self.shows = True
        self.name: list[int] | None = None  # the ids of a channel's name, while it is written

    def push(self, token: int) -> bool:
        """Process the next id; return whether it is shown."""
        if token == self.start:
            self.shows = False
            self.name = None
            return False
        if token == self.channel:
            self.shows = False
            self.name = []
            return False
        if token == self.message:
            # A message without a channel is shown. A format may follow the channel's name.
            name = FINAL if self.name is None else decode_ids(self.tokenizer, self.name)
            self.shows = name.strip().startswith(FINAL)
            self.name = None
            return False
        if self.name is not None:
            self.name.append(token)
        return self.shows


def find_shown_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the ids of an answer that are shown."""
    reader = ChannelReader(tokenizer)
    return [token for token in ids if reader.push(token)]
