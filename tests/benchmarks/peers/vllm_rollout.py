"""Rollouts by vLLM's own engine, in its own environment: one line of seconds and tokens each.

`python tests/benchmarks/peers/vllm_rollout.py CHECKPOINT ROOM PROMPTS`, where PROMPTS are token ids
as JSON. It draws a rollout for each line that it reads: the number of samples.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# In one process, so that its processor time can be told.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main(checkpoint, room, prompts):
    """Draw until there are no more lines."""
    from vllm import LLM, SamplingParams

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no reply
    prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    engine = LLM(model=checkpoint, dtype="float32", max_model_len=int(room) + 64)
    for line in sys.stdin:
        options = SamplingParams(n=int(line), temperature=1.0, max_tokens=int(room), logprobs=0)
        start, processor = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompts, options, use_tqdm=False)
        took = time.perf_counter() - start, time.process_time() - processor
        tokens = sum(len(drawn.token_ids) for output in outputs for drawn in output.outputs)
        print(*took, tokens, file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
