"""Size limits: how much a reader takes from a file that someone else wrote.

Every reader shares these limits: cache files, portable caches, adapters, gates, checkpoints,
stores, conversations, results and rows of data. Each is far above what this package writes and what
models need, and small enough that no file within it takes gigabytes or minutes.
"""

# JSON, and headers and records, which are JSON too.
DEPTH = 40  # levels
JSON_BYTES = 64 << 20
JSON_ELEMENTS = 1_000_000  # values and keys; a conversation has one for each token
HEADER_BYTES = 16 << 20
HEADER_ELEMENTS = 100_000  # a checkpoint of an adapter for 126 layers has about 40,000

# Elements of training data that a user chose: of one line, or of a file that holds all rows.
ROW_ELEMENTS = 30_000_000

LINES_BYTES = 4 << 30  # of a file of JSON lines that this package wrote, line by line

TEXT_BYTES = 1 << 30  # of a text to compress; a model reads less

# What a file says of a cache.
NAME_LETTERS = 4096  # of a model, an evictor or another name
SYSTEM_LETTERS = 1 << 20  # of a system message, which is compared and never read again
# Letters before every question, and as many after it; chat templates have some dozens.
AROUND_LETTERS = 2000
AROUND_TOKENS = 1024  # of the ids after every question
POSITIONS = 1 << 24  # of a context with its offset; the longest models have 10 million
CELLS = 1 << 32  # layers x heads x positions; a reader may hold a flag for each
LAYERS = 1024  # and as many heads; the largest models have 128 of each
WIDTH = 1 << 20  # numbers of a key, and of a hidden state

# Keys, values and what is added to attention logits. float16, in which models of every size run,
# ends at 65,504, and the largest number measured in caches of SmolLM2 is 26
# (tests/compression/test_bounds.py). With the bound, a logit is at most |q| * 2^16 * D: far from
# 3.4e38, where float32 ends, for every query that a model computes.
LARGEST_NUMBER = 65_536.0
