"""Ask a running `restorekv serve` about a text through LangChain: pip install langchain-openai

restorekv serve --model smollm2 &
python examples/ask_langchain.py examples/lighthouse.txt "What was the name of the keeper on duty?"

Set the environment variable OPENAI_BASE_URL to ask a server other than http://127.0.0.1:8080/v1.
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
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI


def ask(url: str, document: Path, questions: list[str]) -> list[str]:
    """Upload a document once and return the answers to questions about it."""
    client = openai.OpenAI(base_url=url, api_key="none")
    with document.open("rb") as file:
        upload = client.files.create(file=file, purpose="user_data")
    upload = client.files.wait_for_processing(upload.id, poll_interval=0.5)
    if upload.status == "error":
        raise SystemExit(upload.status_details)
    # The server's model that uploads are compressed for, such as smollm2:fast-0.1.
    model = client.models.list().data[-1].id
    chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=64)
    file = {"type": "file", "file": {"file_id": upload.id}}
    messages = [
        [HumanMessage([file, {"type": "text", "text": question}])] for question in questions
    ]
    return [answer.content for answer in chat.batch(messages)]


if __name__ == "__main__":
    url = os.environ.get("OPENAI_BASE_URL") or "http://127.0.0.1:8080/v1"
    try:
        answers = ask(url, Path(sys.argv[1]), sys.argv[2:])
    except openai.APIConnectionError:
        raise SystemExit(f"No server answers at {url}; start restorekv serve first.") from None
    except openai.APIStatusError as error:
        raise SystemExit(f"The server at {url} refuses: {error.message}") from None
    print("\n".join(answers))
