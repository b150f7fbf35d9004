"""Ask a running `restorekv serve` about a text through LlamaIndex: pip install
llama-index-llms-openai-like

restorekv serve --model smollm2 &
python examples/ask_llamaindex.py examples/lighthouse.txt "What was the name of the keeper on duty?"

LlamaIndex sends the document with every question. The server recognizes it by its content and
compresses it only once.
"""

import os
import sys
from pathlib import Path

# Checked before the clients are imported, so that the usage is shown without them.
if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    if not Path(sys.argv[1]).is_file():
        raise SystemExit(f"There is no file {sys.argv[1]}; name a text, then the questions.")

import openai
from llama_index.core.llms import ChatMessage, DocumentBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike


def ask(
    url: str, document: Path, questions: list[str], model: str = "smollm2:fast-0.1"
) -> list[str]:
    """Return the answers to questions about a document."""
    chat = OpenAILike(
        api_base=url, api_key="none", model=model, is_chat_model=True, temperature=0, max_tokens=64
    )
    file = DocumentBlock(
        data=document.read_bytes(), title=document.name, document_mimetype="text/plain"
    )
    answers = []
    for question in questions:
        message = ChatMessage(role="user", blocks=[file, TextBlock(text=question)])
        answers.append(chat.chat([message]).message.content)
    return answers


if __name__ == "__main__":
    url = os.environ.get("OPENAI_BASE_URL") or "http://127.0.0.1:8080/v1"
    try:
        answers = ask(url, Path(sys.argv[1]), sys.argv[2:])
    except openai.APIConnectionError:
        raise SystemExit(f"No server answers at {url}; start restorekv serve first.") from None
    except openai.APIStatusError as error:
        raise SystemExit(f"The server at {url} refuses: {error.message}") from None
    print("\n".join(answers))
