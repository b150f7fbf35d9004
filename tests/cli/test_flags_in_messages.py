"""A sentence that advises a flag advises one that exists, and a server's sentence one that `serve`
has.
"""

import ast
import re
from functools import cache

from restorekv.cli import COMMANDS, _load_command
from restorekv.cli.errors import FLAGS, name_flags
from tests.helpers.source import FILES, MODULES, find_imports, module_name

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
# Flags of other programs, and of a command in chat, in the sentences that say how to call them.
FOREIGN = {
    "--merge": "llama-gguf-split",
    "--force-reinstall": "pip",
    "--no-deps": "pip",
    "--use_fsdp": "accelerate",
    "--kv-transfer-config": "vllm serve",
    "--kv-cache-dtype": "vllm serve",
    "--attention-config": "vllm serve",
    "--generation-config": "vllm serve",
    "--page": "benchmarks",
    "--replace": "/save in chat",
}
# Sentences of the library that the server's own ones replace, or that it never reaches.
ELSEWHERE = {
    "--on-long-text": "told_to_clients in serve/document_checks.py",
    "--yarn": "told_to_clients in serve/document_checks.py",
    "--on-small-budget": "Variant.make_options asks for fewer restore tokens",
    "--json": "publishing an adapter, which no server does",
    "--restore-tokens": "publishing an adapter, which no server does",
    "--nested": "a warning about an adapter, in the log",
    "--max-new-tokens": "FLAGS in cli/errors.py, which words a warning of ask",
    "--allocation": "FLAGS in cli/errors.py, which words a refusal of export",
    "--restore-from": "FLAGS in cli/errors.py, which words a refusal of compress",
    "--targets": "making an adapter, which no server does",
}
TREES = {module_name(path): ast.parse(path.read_text()) for path in FILES}


def texts_of(tree: ast.Module) -> list[str]:
    """The strings of a file that are not docstrings."""
    documented = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    docstrings = {
        id(each.body[0].value)
        for each in documented
        if each.body and isinstance(each.body[0], ast.Expr)
    }
    constants = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.Constant) and id(each) not in docstrings
    ]
    return [each.value for each in constants if isinstance(each.value, str)]


def flags_in(module: str) -> set[str]:
    return {flag for text in texts_of(TREES[module]) for flag in FLAG.findall(text)}


@cache
def flags_of(command: str) -> frozenset[str]:
    """The flags of a command and of the commands below it."""
    found, below = set(), [_load_command(*COMMANDS[command][:2], command)]
    while below:
        each = below.pop()
        found |= {
            flag
            for parameter in each.params
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        below += getattr(each, "commands", {}).values()
    return frozenset(found | {"--help"})


def reached(start: list[str]) -> set[str]:
    """The modules that some modules import, directly or not."""
    found, left = set(), list(start)
    while left:
        module = left.pop()
        if module in TREES and module not in found:
            found.add(module)
            left += find_imports(TREES[module]).all
    return found


def test_every_flag_in_a_message_exists():
    known = {flag for command in COMMANDS for flag in flags_of(command)} | set(FOREIGN)
    modules = [module for module in TREES if module.startswith("restorekv.")]
    # A table of markers is no advice.
    strange = {
        (module, flag) for module in modules for flag in flags_in(module) if flag not in known
    }
    strange -= {("restorekv.restore.hub", "--higokri")}
    assert not {each for each in strange if each[1] != "--version"}, (
        "name a flag of a command, or of FOREIGN"
    )
    assert len({flag for module in modules for flag in flags_in(module)}) > 30, (
        "it looks at something"
    )


def test_every_flag_in_a_message_of_the_server_is_one_of_serves():
    servers = [module for module in MODULES if module.startswith("restorekv.serve.")]
    modules = set(reached([*servers, "restorekv.cli.serve"])) - {
        "restorekv.cli",
        "restorekv.cli.options",
    }
    assert {"restorekv.model.prompt", "restorekv.compression.budget"} <= modules
    known = {*flags_of("serve"), *FOREIGN, *ELSEWHERE}
    assert not {
        (module, flag) for module in modules for flag in flags_in(module) if flag not in known
    }
    own = {flag for module in servers for flag in flags_in(module)}
    assert own and own <= {*flags_of("serve"), *FOREIGN}, (
        "its own sentences advise no other command's"
    )


def test_the_flags_elsewhere_are_said_there():
    for flag in ELSEWHERE:
        assert any(flag in flags_in(module) for module in TREES), f"{flag} is said no more"
        assert flag not in flags_of("serve")


def test_what_python_advises_is_advised_as_flags():
    """Each part of a sentence that the command line rewords is in a sentence of the library."""
    said = {
        text
        for module, tree in TREES.items()
        if module.startswith("restorekv.") and not module.startswith("restorekv.cli")
        for text in texts_of(tree)
    }
    for part in FLAGS:
        # A value may be filled in, as in restore_from={...}.
        assert any(part.partition("'")[0] in text for text in said), f"{part} is said no more"
    assert name_flags("pass its folder, or adapter=None.") == "pass its folder, or --adapter none."
    assert name_flags("or with adapter=None (in the shell --adapter none), to compose them") == (
        "or with --adapter none, to compose them"
    )
    assert name_flags("restore_tokens needs an adapter; pass adapter=..., or drop it.") == (
        "--restore-tokens needs an adapter; name one with --adapter, or drop it."
    )
    assert name_flags("(or use fewer of them with on_small_budget='fewer', in the shell --x)") == (
        "(or use fewer of them with --x)"
    )
