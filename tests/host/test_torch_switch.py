"""Models switched over without editing them: F.scaled_dot_product_attention, and Hugging Face's attention interface."""

import pytest
import torch
import torch.nn.functional as F

import cudnn_frost_sm120.torch as ours
from cudnn_frost_sm120.torch import notices, ops, switch

TORCH = F.scaled_dot_product_attention


@pytest.fixture
def calls(monkeypatch):
    """The options of every call of our forward: scale, bottom_right, left bound, right bound, deterministic, strict."""
    seen, forward = [], ops.forward

    def counted(*arguments):
        seen.append(arguments)
        return forward(*arguments)

    monkeypatch.setattr(ops, "forward", counted)
    monkeypatch.setattr(notices, "_said", set())
    return seen


def block():
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), torch.randn(2, 9, 32)


def gradients(model, *inputs, **named):
    model.zero_grad()
    model(*inputs, **named).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("masked", [False, True])
def test_a_torch_model_is_switched_over_and_back(calls, masked):
    model, x = block()
    named = {"src_mask": torch.nn.Transformer.generate_square_subsequent_mask(9)} if masked else {}
    expected = gradients(model, x, **named)
    assert not calls
    with ours.replace_torch_sdpa():
        got = gradients(model, x, **named)
    assert len(calls) == 1
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5)
    gradients(model, x, **named)
    assert len(calls) == 1
    assert F.scaled_dot_product_attention is TORCH


def test_back_even_after_an_error_and_nested(calls):
    with pytest.raises(KeyError), ours.replace_torch_sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is TORCH
    with ours.replace_torch_sdpa():
        with ours.replace_torch_sdpa(strict=True):
            pass
        assert F.scaled_dot_product_attention is not TORCH
    assert F.scaled_dot_product_attention is TORCH


def test_a_switched_model_compiles_without_a_graph_break(calls):
    model, x = block()
    expected = gradients(model, x)
    torch.compiler.reset()
    with ours.replace_torch_sdpa(strict=True):
        got = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), x)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[f"_orig_mod.{name}"], gradient, rtol=1e-4, atol=1e-5)


def test_as_a_decorator(calls):
    q = torch.randn(1, 2, 5, 8, requires_grad=True)

    @ours.replace_torch_sdpa()
    def step():
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    torch.testing.assert_close(step(), TORCH(q, q, q, is_causal=True))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("shape", "arguments", "sentence"),
    [
        ((1, 2, 5, 8), {"dropout_p": 0.5}, "no dropout"),
        ((2, 5, 8), {}, r"not \(B, H, S, D\)"),
    ],
)
def test_what_ours_has_no_arguments_for_goes_to_torch(calls, caplog, shape, arguments, sentence):
    q = torch.randn(shape, requires_grad=True)
    with ours.replace_torch_sdpa():
        assert F.scaled_dot_product_attention(q, q, q, **arguments).shape == q.shape
        F.scaled_dot_product_attention(q, q, q, **arguments)
    assert not calls
    assert len(caplog.records) == 1
    with pytest.raises(NotImplementedError, match=sentence), ours.replace_torch_sdpa(strict=True):
        F.scaled_dot_product_attention(q, q, q, **arguments)


def test_signature_is_torchs():
    """Positional calls mean the same."""
    q, k = torch.randn(1, 4, 5, 8, requires_grad=True), torch.randn(1, 2, 5, 8)
    with ours.replace_torch_sdpa():
        got = F.scaled_dot_product_attention(q, k, k, None, 0.0, True, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(got, TORCH(q, k, k, None, 0.0, True, scale=0.2, enable_gqa=True))
    assert switch.torch_sdpa is TORCH


# ---- Hugging Face ----------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def language_model(kind, implementation, **more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_attn_implementation(implementation)
    return model


def loss_and_gradients(model, length=24, **named):
    tokens = torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(1))
    # A row of padding may keep nothing: zeros for us and for torch, an average for transformers' eager attention.
    real = named.get("attention_mask", torch.ones_like(tokens)) == 1
    labels = tokens.masked_fill(~real | ~real.roll(1, 1), -100)  # neither predicted nor predicting
    loss = model(input_ids=tokens, labels=labels, use_cache=False, **named).loss
    model.zero_grad()
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare(kind, calls, named=None, **more):
    """Ours against transformers' own eager attention; returns the options of our calls."""
    pytest.importorskip("transformers")
    name = ours.register_with_transformers(strict=True)
    expected = loss_and_gradients(language_model(kind, "eager", **more), **named or {})
    got = loss_and_gradients(language_model(kind, name, **more), **named or {})
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-6)
    assert got[1].keys() == expected[1].keys()
    for parameter, gradient in expected[1].items():
        torch.testing.assert_close(
            got[1][parameter], gradient, rtol=1e-3, atol=1e-5, msg=lambda m, p=parameter: f"{p}: {m}"
        )
    return calls


def test_llama(calls):
    seen = compare("Llama", calls)
    assert len(seen) == SIZES["num_hidden_layers"]
    for _, _, _, bias, sinks, _, _, _, bottom_right, left, right, *_ in seen:
        assert (bias, sinks, bottom_right, left, right) == (None, None, False, None, 0), "causal, and no mask stored"


def test_a_sliding_window_is_a_window_and_no_stored_mask(calls):
    for *_, left, right, _, _ in compare("Mistral", calls, sliding_window=7):
        assert (left, right) == (7, 0), "7 keys with the one on the diagonal"
    assert all(call[3] is None for call in calls)


def test_a_window_wider_than_the_text_is_causal(calls):
    for *_, left, right, _, _ in compare("Mistral", calls, sliding_window=100):
        assert (left, right) == (None, 0)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_on_either_side(calls, side):
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, slice(18, None) if side == "right" else slice(0, 6)] = 0
    seen = compare("Llama", calls, {"attention_mask": mask})
    assert all(call[3] is not None for call in seen), "as a bias"


def test_sinks_and_windows_of_gpt_oss(calls):
    more = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5}
    seen = compare("GptOss", calls, **more)
    assert all(call[4] is not None for call in seen)
    assert {call[9] for call in seen} == {5, None}, "every other layer has a window"


def test_dropout_goes_to_transformers_own(calls, caplog):
    pytest.importorskip("transformers")
    model = language_model("Llama", ours.register_with_transformers(), attention_dropout=0.5)
    loss_and_gradients(model.train())
    assert not calls
    assert [r.getMessage() for r in caplog.records if r.name == "cudnn_frost_sm120"] == [
        "transformers' own sdpa attention runs: dropout is not there"
    ]
    strict = language_model("Llama", ours.register_with_transformers(strict=True), attention_dropout=0.5)
    with pytest.raises(NotImplementedError, match="LlamaAttention asks for dropout"):
        loss_and_gradients(strict.train())


def test_generation_runs_on_torch(calls):
    pytest.importorskip("transformers")
    prompt = torch.randint(0, 61, (1, 6), generator=torch.Generator().manual_seed(2))
    tokens = [
        language_model("Llama", name).generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        for name in (ours.register_with_transformers(), "eager")
    ]
    assert torch.equal(*tokens)
    assert not calls


def test_gradient_checkpointing(calls):
    pytest.importorskip("transformers")
    name = ours.register_with_transformers()
    expected = loss_and_gradients(language_model("Llama", name))
    seen = len(calls)
    model = language_model("Llama", name)
    model.gradient_checkpointing_enable()
    got = loss_and_gradients(model.train())
    for parameter, gradient in expected[1].items():
        torch.testing.assert_close(got[1][parameter], gradient, rtol=1e-4, atol=1e-6)
    assert len(calls) == 3 * seen, "forward, and forward again in the backward"


def test_a_model_compiles_without_a_graph_break():
    pytest.importorskip("transformers")
    name = ours.register_with_transformers()
    expected = loss_and_gradients(language_model("Llama", name))
    model = language_model("Llama", name)
    torch.compiler.reset()
    got = loss_and_gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(got[0], expected[0])
    for parameter, gradient in expected[1].items():
        torch.testing.assert_close(got[1][f"_orig_mod.{parameter}"], gradient, rtol=1e-4, atol=1e-6)
