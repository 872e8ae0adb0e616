"""The light tokenizer path against transformers' own, on the model the server makes for itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from midstream.models.tiny_moe import write_tiny_moe
from midstream.replica.text.chat import TextModel

MESSAGES = [
    {"role": "system", "content": "Du zählst."},
    {"role": "user", "content": "one two 😀 <|im_end|> three"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "and?\n"},
]


def test_prompts_and_chats_have_the_ids_that_auto_tokenizer_gives(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    write_tiny_moe(directory)
    ours, theirs = TextModel.load(directory), AutoTokenizer.from_pretrained(directory)
    chat = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert list(ours.encode_rendered(ours.render(MESSAGES))) == chat
    for text in ("plain", "é\x00\u2028 <|im_start|>x", " leading and trailing "):
        assert list(ours.encode(text)) == theirs(text).input_ids


@pytest.mark.slow
def test_a_replica_process_does_not_import_torch(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    write_tiny_moe(directory)
    program = (
        "import json, sys; from pathlib import Path; import midstream.replica.app;"
        "from midstream.replica.text.chat import TextModel; model = TextModel.load(Path(sys.argv[1]));"
        "text = model.render([{'role': 'user', 'content': 'hi'}]);"
        "print(json.dumps([text, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, check=True)
    assert json.loads(done.stdout) == ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False]
