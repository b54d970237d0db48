"""What a sampler answered: whether it is whole, and the trainer's opinion of it."""

import numpy as np

from twinkle_jax.data import Template

CHATS = [
    {"messages": [{"role": "user", "content": "12+3="}], "user_data": [("ground_truth", "15")]},
    {"messages": [{"role": "user", "content": "4"}]},
]


def sequences_of(response):
    return [seq for one in response for seq in one.sequences]


def tokens_of(response):
    return [seq.tokens for seq in sequences_of(response)]


def kinds_of(response):
    return {seq.logprobs_kind for seq in sequences_of(response)}


def logprobs_of(response):
    return np.concatenate([[x[0][1] for x in seq.logprobs] for seq in sequences_of(response)])


def of_drawn(response, rows):
    """Rows of what the trainer computed, at the positions of drawn tokens."""
    pairs = zip(response.inputs, rows, strict=True)
    return [row[np.flatnonzero(feature["labels"] != -100)] for feature, row in pairs]


def policy_logprobs(actor, response, temperature=1.0):
    """The trainer's log-probabilities of what was drawn."""
    scored = actor.forward_only(inputs=response.inputs, temperature=temperature)["logps"]
    return np.concatenate(of_drawn(response, scored))


def gap(response, actor, temperature=1.0):
    """The largest difference between what sampler and actor say of what was drawn."""
    return np.abs(logprobs_of(response) - policy_logprobs(actor, response, temperature)).max()


def assert_whole(response, tokenizer, most):
    """The response of `CHATS` holds what training needs; `most` tokens were asked for."""
    for chat, one in zip(CHATS, response, strict=True):
        prompt = Template(tokenizer).encode(chat, add_generation_prompt=True)["input_ids"].tolist()
        assert one.prompt_token_ids == prompt
        for seq in one.sequences:
            feature = seq.new_input_feature
            assert feature["input_ids"].tolist() == prompt + seq.tokens
            assert feature["labels"].tolist() == [-100] * (len(prompt) - 1) + seq.tokens + [-100]
            assert [pair[0][0] for pair in seq.logprobs] == seq.tokens
            assert feature["messages"][-1]["role"] == "assistant"
            ended = seq.tokens[-1] == tokenizer.eos_token_id
            assert seq.stop_reason == ("stop" if ended else "length")
            assert ended or len(seq.tokens) == most
            assert seq.decoded == tokenizer.decode(seq.tokens)
    trajectory = response.trajectories[0]
    assert trajectory["user_data"] == [("ground_truth", "15")]
    assert trajectory["completion_length"] == len(response[0].sequences[0].tokens)
