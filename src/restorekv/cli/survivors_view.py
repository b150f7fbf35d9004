"""What a cache file holds, and which tokens survived, as tables and text."""

import math
from fractions import Fraction
from pathlib import Path

from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cli.errors import make_visible
from restorekv.cli.loading import describe_method
from restorekv.cli.terminal import output, print_figures, write_figures
from restorekv.context import describe_bytes, format_bytes
from restorekv.errors import ModelError
from restorekv.evaluation.survivors import Survivors, save_plot
from restorekv.model.load import load_tokenizer
from restorekv.model.names import TINY, find_known_name
from restorekv.model.prompt import hash_template
from restorekv.model.tokenize import split_into_pieces

SHADES = " ░▒▓█"
STEPS = " ▁▂▃▄▅▆▇█"
# Colors of the color map cividis: the more heads keep a token, the brighter it is.
INKS = ("grey50", "white on #2c3e66", "white on #575c6d", "black on #a59c74", "black on #fde737")
GONE = "·"


def show_survivors(
    file: Path, plot: Path | None, json: Path | None, model: str | None, tokens: int
) -> None:
    """Print what a cache file holds.

    Args:
        file: The cache file.
        plot: A picture to draw, or None.
        json: A file for the figures, or None.
        model: The model whose tokenizer decodes the text; None tries those of models that ship.
        tokens: How many tokens of the text to show.
    """
    survivors = Survivors.load(file)
    tokenizer = _find_tokenizer(survivors, model)
    if plot:
        save_plot(survivors, plot, file.name)
    if json:
        write_figures(
            json, {"file": str(file), "file_bytes": file.stat().st_size, **survivors.to_json()}
        )
    print_figures(str(file), _list_facts(survivors))
    output.print(tabulate_heads(survivors))
    output.print(draw_positions(survivors))
    if tokenizer is None:
        output.print("The text is not shown: name the model with --model for its tokenizer.")
    else:
        output.print(show_text(survivors, tokenizer, tokens))
    if plot:
        output.print(f"Drew {plot}", soft_wrap=True)


def _find_tokenizer(survivors: Survivors, model: str | None) -> Tokenizer | None:
    """Return the tokenizer of `model` or, without one, of a model that ships and has the chat
    template that the file records; None if there is no such model.
    """
    if model is not None:
        return load_tokenizer(model)
    for name in filter(None, (find_known_name(survivors.manifest.model), TINY)):
        try:
            tokenizer = load_tokenizer(name, offline=True)
        except ModelError:
            continue
        if hash_template(tokenizer) == survivors.manifest.template:
            return tokenizer
    return None


def _list_facts(survivors: Survivors) -> dict[str, str]:
    """Return how the file was made and what it holds."""
    m = survivors.manifest
    full = survivors.keep.numel()
    ratio = float(Fraction(m.ratio))
    surviving = m.tokens - survivors.forgotten
    context = f"T = {m.tokens:,} tokens, chat prefix S = {m.prefix:,} ({m.prefix_policy})"
    if m.cut:
        context += f", {m.cut:,} tokens were cut"
    facts = {
        "model": f"{m.model} ({m.dtype}, fingerprint {m.fingerprint})",
        "method": describe_method(m),
        "context": context,
        "budget": f"r = {ratio:g}: {m.pairs:,} KV pairs, {m.pairs_held:,} held of {full:,}",
        "bytes": describe_bytes(m.bytes_held, m.bytes_full),
        "tokens": f"{surviving:,} of {m.tokens:,} survive in at least one head",
    }
    if m.windows:
        facts["windows"] = (
            f"{len(m.windows) - m.windows.count(0)} of {len(m.windows)} layers see the last "
            f"{max(m.windows):,} tokens alone: {m.sliding_pairs:,} pairs outside the budget, "
            f"{format_bytes(m.sliding_bytes)} of the bytes"
        )
    if m.states:
        with_pairs = m.shape["layers"]
        kept = f"{len(m.states)} of {m.layers} layers keep a state instead of pairs"
        # In such a file the states of layers that have pairs too come behind all pairs.
        if m.states == list(range(with_pairs, 2 * with_pairs)):
            kept = f"all {with_pairs} layers keep a state beside pairs"
        facts["states"] = f"{kept}: {format_bytes(m.state_bytes)} of the bytes, outside the budget"
    return facts


def tabulate_heads(survivors: Survivors) -> Table:
    """Return a table of the number of context tokens that each head keeps, shaded, and each layer's
    share of all that are kept.
    """
    counts = survivors.per_head
    shares = survivors.per_layer
    max_count = max(int(counts.max()), 1)
    # A head's column has its title or the count, a shade and a rule; the other columns have 46
    # characters.
    head_width = max(len(f"head {counts.shape[1]}"), len(f"{max_count:,}") + 2) + 3
    numbered = counts.shape[1] * head_width + len(f"{max_count:,.1f}") + 46 <= output.width
    table = Table(
        title="Context tokens kept, by layer and KV head", title_justify="left", title_style="bold"
    )
    table.add_column("layer", justify="right", no_wrap=True)
    if numbered:
        for head in range(counts.shape[1]):
            table.add_column(f"head {head}", justify="right", no_wrap=True)
    else:
        table.add_column(f"heads 0-{counts.shape[1] - 1} (█ = {max_count:,})")
    table.add_column("mean", justify="right", no_wrap=True)
    table.add_column("share of all")
    for layer, row in enumerate(counts.tolist()):
        shades = [_choose_shade(count / max_count) for count in row]
        if numbered:
            cells = [f"{count:,} {sign}" for count, sign in zip(row, shades, strict=True)]
        else:
            cells = ["".join(shades)]
        bar = "█" * round(16 * float(shares[layer] / shares.max().clamp(min=1e-9)))
        table.add_row(
            str(layer), *cells, f"{sum(row) / len(row):,.1f}", f"{bar} {float(shares[layer]):.1%}"
        )
    return table


def draw_positions(survivors: Survivors) -> Text:
    """Return a line of bars: the share of heads that keep a token, for each part of the context."""
    share = survivors.per_position[survivors.context.prefix_length :]
    width = min(64, len(share))
    parts = [float(part.mean()) for part in share.tensor_split(width)]
    line = "".join(STEPS[math.ceil(8 * part / max(*parts, 1e-9))] for part in parts)
    text = Text("Heads that keep a token, along the context", style="bold")
    text.append(
        f" (█ = {max(parts):.1%}, {len(share) / width:.3g} tokens a bar)\n", style="not bold"
    )
    return text.append(f"start │{line}│ end\n", style="not bold")


def show_text(survivors: Survivors, tokenizer: Tokenizer, limit: int) -> Text:
    """Return the text as the cache has it: the more heads keep a token, the brighter it is; a dot
    replaces one that no head keeps.
    """
    start = survivors.context.prefix_length
    share = survivors.per_position[start:]
    max_share = max(float(share.max()), 1e-9)
    text = Text(
        "The first tokens of the text; what no head keeps is a dot\n", style="bold", end="\n"
    )
    ids = survivors.context.ids[0, start : start + limit].tolist()
    first = 0
    for characters, tokens in split_into_pieces(tokenizer, tuple(ids)):
        piece = make_visible(characters)
        part = float(share[first : first + tokens].max())
        first += tokens
        if part == 0:
            blank = piece[: len(piece) - len(piece.lstrip())]
            text.append(blank + GONE, style="not bold grey50")
        else:
            text.append(piece, style="not bold " + INKS[max(1, round(4 * part / max_share))])
    if limit < len(share):
        text.append(f" ... ({len(share) - limit:,} more)", style="not bold")
    return text


def _choose_shade(part: float) -> str:
    """Return a character from blank (0) to full (1)."""
    return SHADES[math.ceil(4 * part)]
