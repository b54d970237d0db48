"""The oracle: greedy completions are those of transformers, token for token."""

import jax
import numpy as np
import pytest

from tests.model.families import NAMES, batch, each, family
from tests.sampler.completions import PROMPTS
from twinkle_jax.model import load_pretrained
from twinkle_jax.sampler import STOP, Sampling, generate

_GET = "pip install 'twinkle-jax[test,oracle]'"
torch = pytest.importorskip("torch", reason=_GET)
transformers = pytest.importorskip("transformers", reason=_GET)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", each(NAMES))
def test_greedy_completions_are_those_of_transformers(name, tmp_path):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**family(name))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            centre = 0.7 if "norm" in parameter or "dt_bias" in parameter else 0.0
            p.copy_(centre + 0.3 * torch.randn_like(p))
    model.save_pretrained(tmp_path)
    decoder = load_pretrained(tmp_path)
    tokens, mask = batch(PROMPTS, 6, "left")

    def both(stops, penalty):
        theirs = model.generate(
            torch.tensor(np.array(tokens)),
            attention_mask=torch.tensor(np.array(mask), dtype=torch.long),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=stops or None,
            pad_token_id=0,
            repetition_penalty=penalty,
        )[:, 6:].numpy()
        ours = generate(
            decoder.params,
            decoder.config,
            tokens,
            mask,
            jax.random.key(0),
            Sampling(0.0, repetition_penalty=penalty, stop_tokens=stops),
            max_new_tokens=12,
        )
        np.testing.assert_array_equal(np.asarray(ours.tokens)[:, : theirs.shape[1]], theirs)
        return ours

    free = both([], 1.0)
    stops = [int(free.tokens[0, 4]), int(free.tokens[1, 2])]
    stopped = both(stops, 1.0)
    assert np.all(stopped.finish_reasons[:2] == STOP)
    both([], 1.4)
