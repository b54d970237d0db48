"""Chat templates of two families, and small tokenizers that go with them."""

import functools

from twinkle_jax.data import Tokenizer

CHATML = """{%- if tools %}
{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set words = message.content %}
    {%- if message.role == 'assistant' and '</think>' in words and not loop.last %}
        {%- set words = words.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + words + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

CORPUS = [
    "system user assistant tool\n\nWhat is the sum of two and three?\n",
    "The answer is 5. Let me think: 2 + 3 = 5, naïve café 你好 🙂\n" * 3,
]


@functools.cache
def chatml_tokenizer():
    return _byte_pairs(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ["<think>", "</think>", "<tool_call>"],
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML},
    )


@functools.cache
def llama_tokenizer():
    return _byte_pairs(
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        [],
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA},
        post="<|begin_of_text|>",
    )


def _byte_pairs(special, added, config, post=None):
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    if post:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{post} $A", special_tokens=[(post, backend.token_to_id(post))]
        )
    return Tokenizer(backend, config)
