"""Models of transformers with their weights on flash: constructed, loaded, saved, and generating."""

import pytest
import torch
from safetensors.torch import load_file

import penstock
from host_runs import needs
from penstock import weights
from penstock.weights.resting import RestingParameter

FLOOR = 8192
VOCABULARY = 64


@pytest.fixture(params=["gpt2", "llama"])
def make(request):
    """Constructor of a small model in one of two architectures; the first has a tied head."""
    transformers = needs("transformers", "accelerate")
    if request.param == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return lambda: transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return lambda: transformers.LlamaForCausalLM(config)


def built(make, seed=0):
    torch.manual_seed(seed)
    return make().eval()


def on_flash(model, directory):
    return penstock.offload(
        model,
        weights="flash",
        weights_memory="128KiB",
        floor=FLOOR,
        flash=str(directory),
        device_memory="64MiB",
    )


def generated(model):
    """Tokens that a model generates, one by one and as drawn, with the logits of each."""
    tokens = torch.arange(8).view(1, 8)
    torch.manual_seed(1)
    found = []
    for sampled in (False, True):
        done = model.generate(
            tokens, max_new_tokens=6, do_sample=sampled, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        found += [done.sequences, *done.logits]
    return found


def learned(model):
    """Losses and weights of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        tokens = (torch.arange(16).view(2, 8) * (step + 3)) % VOCABULARY
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return found + [each.detach().clone() for each in model.parameters()]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def resting(model):
    return [each for each in model.parameters() if type(each) is RestingParameter]


def test_a_session_generates_saves_and_trains_as_plain(make, disk_path):
    plain, model = built(make), built(make)
    expected = generated(plain)
    plain.save_pretrained(disk_path / "plain")
    with on_flash(model, disk_path) as session:
        assert_equal(generated(model), expected)
        model.save_pretrained(disk_path / "saved")
        assert_equal(learned(model), learned(plain))
        total = session._weights.total_bytes
        assert session._weights.forced == 0
    assert total > 128 << 10, "the weights must not fit"
    saved, wanted = (
        load_file(disk_path / each / "model.safetensors") for each in ("saved", "plain")
    )
    assert saved.keys() == wanted.keys()
    assert_equal([saved[name] for name in wanted], list(wanted.values()))


def test_a_model_that_is_constructed_on_flash_is_as_plain(make, disk_path):
    plain = built(make)
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        model = built(make)
    large = [each for each in plain.parameters() if each.nbytes >= FLOOR]
    assert len(resting(model)) == len(large)
    assert_equal(generated(model), generated(plain))
    model.save_pretrained(disk_path / "saved")
    again = type(plain).from_pretrained(disk_path / "saved")
    assert_equal(list(again.state_dict().values()), list(plain.state_dict().values()))
    with on_flash(model, disk_path):
        assert_equal(learned(model), learned(plain))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_with_its_parameters_on_meta_is_loaded(make, disk_path, in_place):
    """As the error of a model that is all on meta advises."""
    import accelerate

    plain = built(make)
    plain.save_pretrained(disk_path / "saved")
    with accelerate.init_empty_weights():
        model = make().eval()
    model.tie_weights()
    model.requires_grad_(not in_place)
    weights.load(model, disk_path / "saved", directory=disk_path, floor=FLOOR, in_place=in_place)
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    assert resting(model)
    if not in_place:  # else, outside of a session, they are used where in the file they begin
        assert_equal(generated(model), generated(plain))
    with on_flash(model, disk_path):
        assert_equal(generated(model), generated(plain))


def test_modules_with_buffers_that_are_not_saved_are_put_in_place(disk_path):
    transformers = needs("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    plain = built(lambda: transformers.LlamaForCausalLM(config))
    weights.save(plain, disk_path / "saved")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(
        penstock.ConfigError, match=r"inv_freq of a LlamaRotaryEmbedding is on meta"
    ):
        weights.load(model, disk_path / "saved", directory=disk_path, floor=FLOOR)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    weights.load(model, disk_path / "saved", directory=disk_path, floor=FLOOR)
    assert resting(model)
    assert_equal(generated(model), generated(plain))
