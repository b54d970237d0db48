"""The oracle of one update: transformers' model, GRPO and AdamW in PyTorch."""

import numpy as np
import pytest

from tests.model.families import each, family
from twinkle_jax.twinkle.model import TransformersModel

_GET = "pip install 'twinkle-jax[test,oracle]'"
torch = pytest.importorskip("torch", reason=_GET)
transformers = pytest.importorskip("transformers", reason=_GET)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [16, 17, 18, 19, 20]]
PROMPT, EPSILON, BETA, LR, LIMIT = 2, 0.2, 0.05, 0.01, 0.5
ADVANTAGES = [1.0, -0.5, 0.75]


def features():
    return [
        {"input_ids": row, "labels": [-100] * (PROMPT - 1) + row[PROMPT:] + [-100]} for row in ROWS
    ]


def oracle_loss(model, old, ref):
    """GRPO, row by row, as the paper has it."""
    total = 0
    for i, row in enumerate(ROWS):
        logits = model(input_ids=torch.tensor([row])).logits[0]
        logprobs = torch.log_softmax(logits, -1)[PROMPT - 1 : -1]
        logps = logprobs.gather(-1, torch.tensor(row[PROMPT:])[:, None])[:, 0]
        ratio = torch.exp(logps - torch.tensor(old[i]))
        clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
        change = torch.tensor(ref[i]) - logps
        kl = torch.exp(change) - change - 1
        surrogate = torch.minimum(ratio * ADVANTAGES[i], clipped * ADVANTAGES[i])
        total = total + (-surrogate + BETA * kl).mean()
    return total / len(ROWS)


@pytest.mark.parametrize("name", each(["qwen3", "qwen2", "qwen3_5_text"]))
def test_loss_gradient_and_update(name, tmp_path):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**family(name))
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(tmp_path / "in")
    ours = TransformersModel(tmp_path / "in")
    ours.set_loss("GRPOLoss", epsilon=EPSILON, beta=BETA)
    ours.set_optimizer("AdamW", lr=LR, weight_decay=0.1)
    rng = np.random.default_rng(0)
    logps = ours.forward_only(inputs=features())["logps"]
    noisy = [
        [
            (logps[i, PROMPT - 1 : len(row) - 1] + 0.3 * rng.normal(size=len(row) - PROMPT))
            for i, row in enumerate(ROWS)
        ]
        for _ in range(2)
    ]
    old, ref = ([x.astype(np.float32) for x in rows] for rows in noisy)

    loss = oracle_loss(model, old, ref)
    loss.backward()
    value = ours.forward_backward(
        inputs=features(),
        advantages=ADVANTAGES,
        old_logps=old,
        ref_logps=[list(row) for row in ref],
        micro_batch_size=2,
    )["loss"]
    np.testing.assert_allclose(value, loss.item(), rtol=1e-4, atol=1e-6)

    from twinkle_jax.model import Decoder
    from twinkle_jax.model.huggingface.checkpoint import list_tensors
    from twinkle_jax.model.huggingface.checkpoint_files import PREFIX

    gradient = Decoder(ours.config, ours.state.gradient_sum)
    denominator = float(ours.state.denominator)
    theirs = {key: p.grad.numpy() for key, p in model.named_parameters()}
    tensors = list_tensors(gradient, PREFIX, None)
    assert {tensor.name for tensor in tensors} == theirs.keys()
    for tensor in tensors:
        expected = theirs[tensor.name]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            tensor.fetch() / denominator, expected, atol=2e-4 * scale + 1e-6, rtol=0
        )

    # As Twinkle groups them: norms and biases do not decay.
    groups = {True: [], False: []}
    for key, p in model.named_parameters():
        groups[not any(word in key for word in ("norm", "bias"))].append(p)
    assert all(groups.values())
    optimizer = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False]}],
        lr=LR,
        weight_decay=0.0,
    )
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()
    info = ours.clip_grad_and_step(max_grad_norm=LIMIT)
    np.testing.assert_allclose(info.gradient_norm, norm.item(), rtol=1e-4)
    after = ours.get_state_dict()
    for key, p in model.named_parameters():
        expected, gradient = p.detach().numpy(), theirs[key]
        # Adam's first step is the sign of the gradient, which noise decides where it is small.
        clear = np.abs(gradient) > 1e-3 * np.abs(gradient).max()
        np.testing.assert_allclose(after[key][clear], expected[clear], atol=1e-4)
