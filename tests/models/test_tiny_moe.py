"""tiny-moe: same bytes for the same seed, an ordinary Hugging Face checkpoint, routers that differ."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from midstream.models.tiny_moe import SPECIAL_TOKENS, TOKEN_ID, VOCAB_SIZE, build_tokenizer, write_tiny_moe

pytestmark = pytest.mark.slow

EXPECTED_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def digests(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_moe(path)
    return path


def test_same_seed_gives_the_same_bytes_whatever_torchs_global_generator_did_before(directory, tmp_path):
    torch.manual_seed(123)
    torch.rand(7)
    write_tiny_moe(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(directory)
    assert set(digests(directory)) == EXPECTED_FILES


def test_same_seed_gives_the_same_bytes_in_another_process(directory, tmp_path):
    code = (
        "import sys; from pathlib import Path; from midstream.models.tiny_moe import write_tiny_moe;"
        "write_tiny_moe(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "other")], check=True, timeout=120)
    assert digests(tmp_path / "other") == digests(directory)


def test_another_seed_changes_the_weights_and_nothing_else(directory, tmp_path):
    write_tiny_moe(tmp_path / "other", seed=1)
    ours, theirs = digests(directory), digests(tmp_path / "other")
    assert {name for name in ours if ours[name] != theirs[name]} == {"model.safetensors"}


def test_writing_leaves_torchs_global_generator_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    write_tiny_moe(tmp_path / "m", layers=1, hidden=64)
    assert torch.equal(torch.rand(3), expected)


def test_the_checkpoint_has_one_tensor_per_expert_and_projection(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        keys = set(file.keys())
        shape = tuple(file.get_slice("model.layers.3.mlp.experts.7.gate_proj.weight").get_shape())
    assert shape == (128, 128)
    assert "model.layers.0.mlp.gate.weight" in keys
    assert len([k for k in keys if ".experts." in k]) == 4 * 8 * 3


def test_a_load_and_save_round_trip_is_exact(directory, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 3_000_000
    model.save_pretrained(tmp_path / "copy")
    build_tokenizer().save_pretrained(tmp_path / "copy")
    assert digests(tmp_path / "copy") == digests(directory)


def test_float32_holds_the_values_that_bfloat16_rounds(directory, tmp_path):
    write_tiny_moe(tmp_path / "f32", dtype="float32")
    full = AutoModelForCausalLM.from_pretrained(tmp_path / "f32").state_dict()
    half = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(full[name].dtype == torch.float32 for name in full)
    assert all(torch.equal(full[name].bfloat16(), half[name]) for name in full)


def test_the_tokenizer_has_one_token_per_byte_and_round_trips_any_text(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "".join(map(chr, range(0x250))) + "  two  spaces, naïve 日本 🦀\r\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == VOCAB_SIZE == 264
    assert [tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS] == list(range(256, 264))


def test_every_byte_is_its_own_token_id():
    tokenizer = build_tokenizer()
    raw = bytes(range(256))
    tokens = tokenizer.convert_ids_to_tokens(list(raw))
    assert len(set(tokens)) == 256
    assert tokenizer("".join(map(chr, range(128))))["input_ids"] == list(range(128))


def test_the_chat_template_renders_turns_and_ends_at_im_end(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == TOKEN_ID["<|im_start|>"]
    assert ids.count(TOKEN_ID["<|im_end|>"]) == 2
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == TOKEN_ID["<|im_end|>"]


def test_logits_have_spread_and_routes_differ_between_tokens_and_between_precisions(directory):
    def forward(model):
        routes = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda m, i, out: routes.append(out[2].sort(-1).values))
            for layer in model.model.layers
        ]
        with torch.no_grad():
            logits = model(input_ids).logits.float()
        for hook in hooks:
            hook.remove()
        return logits, torch.stack(routes, 1)

    input_ids = torch.randint(0, 256, (4, 128), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(directory)
    _, half_routes = forward(model)
    logits, routes = forward(model.float())
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1).mean().item()
    # log(264) = 5.58.
    assert 4.8 < entropy < 5.45
    for layer in range(4):
        share = torch.bincount(routes[:, layer].reshape(-1), minlength=8) / routes[:, layer].numel()
        assert share.min() > 0.02
        assert share.max() < 0.4
    # Of 512 tokens.
    assert len(set(map(tuple, routes.reshape(len(routes), -1).tolist()))) > 200
    differs = (routes != half_routes).any(-1).any(-1).float().mean().item()
    assert 0.02 < differs < 0.2


def test_a_directory_with_files_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="not empty"):
        write_tiny_moe(tmp_path / "m")
    assert [p.name for p in tmp_path.rglob("*")] == ["m", "mine.txt"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"hidden": 100}, "hidden"),
        ({"top_k": 9}, "top_k"),
        ({"layers": 0}, "layers"),
        ({"max_positions": 0}, "max_pos"),
    ],
)
def test_an_option_that_cannot_work_is_named_and_nothing_is_written(tmp_path, option, message):
    with pytest.raises(ValueError, match=message):
        write_tiny_moe(tmp_path / "m", **option)
    assert list(tmp_path.iterdir()) == []
