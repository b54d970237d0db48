"""Chat templates of some families, and small tokenizers that go with them."""

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

# Templates with tools, shortened, by what is theirs: what a call looks like, what they refuse.
_LLAMA_CALLS = """{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) }}
    {{- '<|end_header_id|>\\n\\n' }}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
        {{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
        {{- m.tool_calls[0].function.arguments | tojson + '}' }}
    {%- else %}{{- m.content | tojson if m.role == 'tool' else m.content | trim }}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_MISTRAL_CALLS = """{{- bos_token }}
{%- for m in messages | rejectattr('role', 'equalto', 'tool') | rejectattr('tool_calls') %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set ids = (m.tool_calls or []) | map(attribute='id') | list %}
    {%- for id in ([m.tool_call_id] if m.role == 'tool' else ids) %}
        {%- if id | length != 9 %}{{ raise_exception('ids must have a length of 9') }}{% endif %}
    {%- endfor %}
    {%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}CALLS{{ eos_token }}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
    {%- else %}RESULT{%- endif %}
{%- endfor %}"""

_DEEPSEEK_CALLS = """{{- bos_token }}
{%- set ns = namespace(answered=false) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}{%- set ns.answered = false %}
    {%- elif m.role == 'assistant' %}
        {{- '' if ns.answered else '<｜Assistant｜>' }}{%- set ns.answered = false %}
        {%- if WRITTEN %}
            {{- (m.content or '') + '<｜tool▁calls▁begin｜>' }}
            {%- for call in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' }}CALL
                {{- '<｜tool▁call▁end｜>' }}
            {%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
        {%- else %}{{- m.content + '<｜end▁of▁sentence｜>' }}{%- endif %}
    {%- else %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
        {%- set ns.answered = true %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.answered %}{{- '<｜Assistant｜>' }}{%- endif %}"""

# Answers of tools are written behind the calls of a message, and refused without them.
_HARMONY_CALLS = """{%- set ns = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if '<|message|>' in m.content %}{{ raise_exception('channels in content') }}{% endif %}
        {%- set thought = '<|start|>assistant<|channel|>analysis<|message|>' %}
        {%- set thought = thought + m.thinking + '<|end|>' if m.thinking else '' %}
        {%- if m.tool_calls %}
            {%- if m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}
            {%- set ns.name = m.tool_calls[0].function.name %}
            {{- thought + '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary' }}
            {{- ' json<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
        {%- else %}
            {%- set last = loop.last and not add_generation_prompt %}
            {{- (thought if last else '') + '<|start|>assistant<|channel|>final<|message|>' }}
            {{- m.content + ('<|return|>' if last else '<|end|>') }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if ns.name is none %}{{ raise_exception('no call') }}{% endif %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

_GEMMA_CALLS = """{%- macro value(x) %}
    {%- if x is string %}{{- '<|"|>' + x + '<|"|>' }}{%- else %}{{- x }}{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- set ns = namespace(answered=false) %}
{%- for m in messages if m.role != 'tool' %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '' if role == 'model' and ns.answered else '<|turn>' + role + '\n' }}
    {%- set ns.answered = false %}
    {%- for call in m.tool_calls or [] %}
        {%- if call.function.arguments is string %}{{ raise_exception('no text') }}{% endif %}
        {{- '<|tool_call>call:' + call.function.name + '{' }}
        {%- for key, x in call.function.arguments.items() %}
            {{- key + ':' + value(x) + ('' if loop.last else ',') }}
        {%- endfor %}
        {{- '}<tool_call|>' }}
    {%- endfor %}
    {%- for call in m.tool_calls or [] %}
        {%- for n in messages if n.role == 'tool' and n.tool_call_id == call.id %}
            {%- set ns.answered = true %}
            {{- '<|tool_response>response:' + call.function.name + '{value:' + value(n.content) }}
            {{- '}<tool_response|>' }}
        {%- endfor %}
    {%- endfor %}
    {{- m.content + ('' if ns.answered else '<turn|>\n') }}
{%- endfor %}
{%- if add_generation_prompt and not ns.answered %}{{- '<|turn>model\n' }}{%- endif %}"""

# The token that ends the assistant's turn begins the next message.
_GLM_CALLS = """{{- '[gMASK]<sop>' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\n<think></think>' + ('\n' + m.content if m.content else '') }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name + '\n' }}
            {%- for key, x in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
                {{- (x if x is string else x | tojson) + '</arg_value>\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '' if messages[loop.index0 - 1].role == 'tool' else '<|observation|>' }}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- else %}{{- '<|' + m.role + '|>\n' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

_V3_CALL = (
    "{{- call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}"
    "{{- call.function.arguments + '\\n```' }}"
)
CALL_TEMPLATES = {
    "llama": _LLAMA_CALLS,
    "mistral": _MISTRAL_CALLS.replace(
        "CALLS",
        "{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}{{- (call.function | tojson)[:-1] }}"
        "{{- ', \"id\": \"' + call.id + '\"}' + (']' if loop.last else ', ') }}{%- endfor %}",
    ).replace(
        "RESULT",
        '{{- \'[TOOL_RESULTS] {"content": \' + m.content + \', "call_id": "\' + m.tool_call_id }}'
        "{{- '\"}[/TOOL_RESULTS]' }}",
    ),
    "mistral with [ARGS]": _MISTRAL_CALLS.replace(
        "CALLS",
        "{%- for call in m.tool_calls %}{{- '[TOOL_CALLS]' + call.function.name }}"
        "{{- '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson }}{%- endfor %}",
    ).replace(
        "RESULT",
        "{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content }}"
        "{{- '[/TOOL_RESULTS]' }}",
    ),
    "deepseek": _DEEPSEEK_CALLS.replace("WRITTEN", "m.tool_calls").replace("CALL\n", _V3_CALL),
    "deepseek v3.1": _DEEPSEEK_CALLS.replace("WRITTEN", "m.tool_calls").replace(
        "CALL\n", "{{- call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}"
    ),
    "deepseek r1 distill": _DEEPSEEK_CALLS.replace("WRITTEN", "m.content is none").replace(
        "CALL\n", _V3_CALL
    ),
    "harmony": _HARMONY_CALLS,
    "gemma": _GEMMA_CALLS,
    "glm": _GLM_CALLS,
}
_CALL_TOKENS = {
    "llama": "<|eot_id|> <|python_tag|> <|start_header_id|> <|end_header_id|>",
    "mistral": "</s> [TOOL_CALLS] [CALL_ID] [ARGS] [INST] [/INST] [TOOL_RESULTS] [TOOL_CONTENT] "
    "[/TOOL_RESULTS]",
    "deepseek": "<｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> "
    "<｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
    "harmony": "<|return|> <|call|> <|end|> <|start|> <|channel|> <|constrain|> <|message|>",
    "gemma": "<turn|> <|turn> <|tool_call> <tool_call|> <|tool_response> <tool_response|> "
    '<|"|> <|channel> <channel|>',
    "glm": "<|observation|> <|user|> <|assistant|> [gMASK] <sop> <tool_call> </tool_call> "
    "<arg_key> </arg_key> <arg_value> </arg_value>",
}

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


@functools.cache
def calls_tokenizer(name):
    """A tokenizer with one of the `CALL_TEMPLATES`, whose control tokens are special."""
    end, *others = _CALL_TOKENS[name.split()[0]].split()
    config = {"bos_token": "<s>", "eos_token": end, "chat_template": CALL_TEMPLATES[name]}
    return _byte_pairs(["<s>", end, *others], [], config)


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
