"""Chat templates of popular models, written from memory and without their parts about tools.

Each gets a byte-level or a SentencePiece-like tokenizer with the control tokens that the template
writes.
"""

import re

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN2 = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or message.role == 'system' and not loop.first "
    "or message.role == 'assistant' %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Earlier answers have no thoughts; one after the last question has an empty place for them.
QWEN3_MESSAGES = (
    "{%- if messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not("
    "message.content.startswith('<tool_response>') and "
    "message.content.endswith('</tool_response>')) %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}"
    "{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role == 'user' or message.role == 'system' and not loop.first %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set reasoning_content = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1]"
    ".lstrip('\n') %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}"
    "{{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') "
    "+ '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
)
QWEN3 = QWEN3_MESSAGES + (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
QWEN3_INSTRUCT = QWEN3_MESSAGES + (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
QWEN3_THINKING = QWEN3_MESSAGES + (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA31 = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}'
    "{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}"
    "{%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}"
    "{{- 'Cutting Knowledge Date: December 2023\n' }}"
    "{{- 'Today Date: ' + date_string + '\n\n' }}{{- system_message }}{{- '<|eot_id|>' }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
    "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
MISTRAL1 = (
    "{{ bos_token }}{% for message in messages %}"
    + ALTERNATE
    + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MISTRAL1_SYSTEM = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}"
    "{%- endif %}{{- bos_token }}{%- for message in loop_messages %}"
    + ALTERNATE
    + "{%- if message['role'] == 'user' %}{%- if loop.first and system_message is defined %}"
    "{{- ' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}{%- else %}"
    "{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}"
    "{%- else %}{{- ' ' + message['content'] + eos_token}}{%- endif %}{%- endfor %}"
)
MISTRAL3 = MISTRAL1_SYSTEM.replace("loop.first", "loop.last").replace("' [INST] '", "'[INST] '")
MISTRAL3 = MISTRAL3.replace("' [/INST]'", "'[/INST]'")
MISTRAL7 = (
    "{%- set today = strftime_now('%Y-%m-%d') %}"
    "{%- set default_system_message = 'You are Mistral Small 3. The date is ' + today + '.' %}"
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}"
    "{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}"
    "{%- else %}{%- set system_message = default_system_message %}"
    "{%- set loop_messages = messages %}{%- endif %}"
    "{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}"
    "{%- for message in loop_messages %}{%- if message['role'] == 'user' %}"
    "{{- '[INST]' + message['content'] + '[/INST]' }}{%- elif message['role'] == 'system' %}"
    "{{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}"
    "{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}"
    "{%- endif %}{%- endfor %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    + ALTERNATE
    + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- if messages[0]['content'] is string -%}"
    "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- else -%}"
    "{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = '' -%}"
    "{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}"
    + ALTERNATE
    + "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}"
    "{%- set role = message['role'] -%}{%- endif -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}"
    "{{'<start_of_turn>model\n'}}{%- endif -%}"
)
PHI3 = (
    "{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] "
    "+ '<|end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI4 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + "
    "message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
R1_DISTILL = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}{% set ns = namespace(system_prompt='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}"
    "{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\n'}}{% endif %}"
)
HARMONY = (
    "{{- '<|start|>system<|message|>' }}"
    "{{- 'You are ChatGPT, a large language model trained by OpenAI.\n' }}"
    "{{- 'Knowledge cutoff: 2024-06\n' }}"
    "{{- 'Current date: ' + strftime_now('%Y-%m-%d') + '\n\n' }}"
    "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    "{{- 'Reasoning: ' + reasoning_effort + '\n\n' }}"
    "{{- '# Valid channels: analysis, commentary, final.<|end|>' }}"
    "{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}"
    "{{- '<|start|>developer<|message|># Instructions\n\n' + messages[0].content + '\n\n' }}"
    "{{- '<|end|>' }}{%- set loop_messages = messages[1:] %}{%- else %}"
    "{%- set loop_messages = messages %}{%- endif %}"
    "{%- for message in loop_messages -%}{%- if message.role == 'assistant' -%}"
    "{%- if '<|channel|>analysis<|message|>' in message.content or "
    "'<|channel|>final<|message|>' in message.content %}"
    "{{- raise_exception('You have passed a message containing <|channel|> tags') }}{%- endif %}"
    "{%- if loop.last and not add_generation_prompt %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}"
    "{%- else %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}"
    "{%- endif %}{%- elif message.role == 'user' -%}"
    "{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant' }}{%- endif -%}"
)
SMOLLM3 = (
    "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}"
    "{%- set reasoning_mode = '/think' if enable_thinking else '/no_think' -%}"
    "{%- if messages[0].role == 'system' -%}{%- set system_message = messages[0].content -%}"
    "{%- if '/no_think' in system_message -%}{%- set reasoning_mode = '/no_think' -%}{%- endif -%}"
    "{%- set custom_instructions = system_message.replace('/no_think', '').replace('/think', '')"
    ".rstrip() -%}{%- endif -%}{{- '<|im_start|>system\n' -}}"
    "{%- set today = strftime_now('%d %B %Y') -%}"
    "{{- '## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: ' ~ today ~ '\n' -}}"
    "{{- 'Reasoning Mode: ' + reasoning_mode + '\n\n## Custom Instructions\n\n' -}}"
    "{%- if custom_instructions -%}{{- custom_instructions + '\n\n' -}}{%- else -%}"
    "{{- 'You are a helpful AI assistant named SmolLM.\n\n' -}}{%- endif -%}{{- '<|im_end|>\n' -}}"
    "{%- for message in messages -%}{%- set content = message.content -%}"
    "{%- if message.role == 'user' -%}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' -%}{%- if reasoning_mode == '/think' -%}"
    "{{ '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}{%- else -%}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}"
    "{%- endif -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{%- if reasoning_mode == '/think' -%}"
    "{{ '<|im_start|>assistant\n' }}{%- else -%}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n' }}{%- endif -%}{%- endif -%}"
)
COMMAND_R = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% if system_message != false %}"
    "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}"
    "{% endif %}{% for message in loop_messages %}"
    + ALTERNATE
    + "{% set content = message['content'] %}{% if message['role'] == 'user' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
GLM4 = (
    "[gMASK]<sop>{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] }}{% elif message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] }}{% else %}"
    "{{ '<|assistant|>\n' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM45 = (
    "[gMASK]<sop>{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{- '<|user|>\n' + m.content }}"
    "{{- '/nothink' if (enable_thinking is defined and not enable_thinking and "
    "not m.content.endswith('/nothink')) else '' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|assistant|>\n<think></think>\n' + m.content.strip() }}"
    "{%- elif m.role == 'system' %}{{- '<|system|>\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}"
    "{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}"
    "{%- endif %}"
)
GRANITE3 = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}"
    '{%- set system_message = "Knowledge Cutoff Date: April 2024.\nToday\'s Date: " + '
    "strftime_now('%B %d, %Y') + '.\nYou are Granite, developed by IBM.' %}"
    "{%- set loop_messages = messages %}{%- endif %}"
    "{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}"
    "{%- for message in loop_messages %}{{- '<|start_of_role|>' + message['role'] + "
    "'<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}"
    "{%- if loop.last and add_generation_prompt %}"
    "{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}{%- endfor %}"
)
OLMO2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
EXAONE4 = (
    "{%- for msg in messages %}{%- if msg.role == 'system' %}"
    "{{- '[|system|]\n' + msg.content + '[|endofturn|]\n' }}{%- elif msg.role == 'user' %}"
    "{{- '[|user|]\n' + msg.content + '[|endofturn|]\n' }}{%- elif msg.role == 'assistant' %}"
    "{{- '[|assistant|]\n<think>\n\n</think>\n\n' + msg.content.split('</think>')[-1].strip() + "
    "'[|endofturn|]\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '[|assistant|]\n' }}{%- if enable_thinking is defined and enable_thinking is true %}"
    "{{- '<think>\n' }}{%- else %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
FALCON3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = 'A chat between a curious user and an assistant.' %}{% endif %}"
    "{% for message in loop_messages %}" + ALTERNATE + "{% if loop.index0 == 0 %}"
    "{{ system_message }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ ' USER: ' + message['content'].strip() }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ASSISTANT: ' + message['content'].strip() + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    + ALTERNATE
    + "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
# Template, end token, start token and the kind of tokenizer.
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>", None, "bytes"),
    "qwen2.5": (QWEN2, "<|im_end|>", None, "bytes"),
    "qwen3": (QWEN3, "<|im_end|>", None, "bytes"),
    "qwen3-instruct": (QWEN3_INSTRUCT, "<|im_end|>", None, "bytes"),
    "qwen3-thinking": (QWEN3_THINKING, "<|im_end|>", None, "bytes"),
    "llama3": (LLAMA3, "<|eot_id|>", "<|begin_of_text|>", "bytes"),
    "llama3.1": (LLAMA31, "<|eot_id|>", "<|begin_of_text|>", "bytes"),
    "mistral1": (MISTRAL1, "</s>", "<s>", "prepended"),
    "mistral1-system": (MISTRAL1_SYSTEM, "</s>", "<s>", "prepended"),
    "mistral3": (MISTRAL3, "</s>", "<s>", "first"),
    "mistral7": (MISTRAL7, "</s>", "<s>", "bytes"),
    "gemma2": (GEMMA2, "<end_of_turn>", "<bos>", "spaces"),
    "gemma3": (GEMMA3, "<end_of_turn>", "<bos>", "spaces"),
    "phi3": (PHI3, "<|endoftext|>", "<s>", "prepended"),
    "phi4": (PHI4, "<|im_end|>", "<|endoftext|>", "bytes"),
    "r1-distill": (R1_DISTILL, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "bytes"),
    "gpt-oss": (HARMONY, "<|return|>", "<|startoftext|>", "bytes"),
    "smollm3": (SMOLLM3, "<|im_end|>", None, "bytes"),
    "command-r": (COMMAND_R, "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", "bytes"),
    "glm4": (GLM4, "<|endoftext|>", None, "bytes"),
    "glm4.5": (GLM45, "<|endoftext|>", None, "bytes"),
    "granite3": (GRANITE3, "<|end_of_text|>", "<|end_of_text|>", "bytes"),
    "olmo2": (OLMO2, "<|endoftext|>", "<|endoftext|>", "bytes"),
    "exaone4": (EXAONE4, "[|endofturn|]", "[BOS]", "bytes"),
    "falcon3": (FALCON3, "<|endoftext|>", None, "bytes"),
    "zephyr": (ZEPHYR, "</s>", "<s>", "prepended"),
    "vicuna": (VICUNA, "</s>", "<s>", "prepended"),
    "llama2": (LLAMA2, "</s>", "<s>", "prepended"),
}
MORE = {"gpt-oss": ["<|call|>", "<|constrain|>"], "phi3": ["<|system|>", "<|user|>"]}


def find_control_names(name: str) -> list[str]:
    """Return the names in a template that look like control tokens."""
    template, eos, bos, _ = TEMPLATES[name]
    pattern = (
        r"<\|\w+\|>|</?think>|<｜[^｜]+｜>|</?s>|<\w+_of_turn>|\[\|\w+\|\]|\[/?[A-Z_]+\]|<sop>"
    )
    names = dict.fromkeys(re.findall(pattern, template.replace("' + message['role'] + '", "user")))
    names.update(dict.fromkeys([eos, *([bos] if bos else []), *MORE.get(name, [])]))
    if name in ("mistral1", "mistral1-system", "llama2", "vicuna", "zephyr"):
        return [each for each in (bos, eos) if each]
    return list(names)


def build_chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the template of a popular model."""
    template, eos, bos, kind = TEMPLATES[name]
    tokenizer = build_backend(kind)
    control = find_control_names(name)
    strips = name == "phi3"
    tokenizer.add_special_tokens(
        [
            AddedToken(each, special=True, normalized=False, rstrip=strips)
            for each in control
            if "think" not in each
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(each, normalized=False) for each in control if "think" in each]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, chat_template=template
    )


MERGES = [("t", "h"), ("th", "e"), ("\n", "\n"), ("c", "o"), ("co", "d"), ("cod", "e")]


def build_backend(kind: str) -> Tokenizer:
    """Return a byte-level BPE with some merges, or SentencePiece's BPE with byte fallback.

    For SentencePiece, the kind says whether a space is prepended to every piece between control
    tokens, to the first piece only, or to none.
    """
    if kind == "bytes":
        space, line = "Ġ", "Ċ"
        words = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        space, line = "▁", "\n"
        words = ["<unk>", *(f"<0x{each:02X}>" for each in range(256))]
        words += ["▁", "\n", *map(chr, range(33, 127))]
    merges = [tuple(each.replace("\n", line) for each in pair) for pair in MERGES]
    merges += [(space, "the"), (space, "code"), (space, space)]
    vocabulary = {word: number for number, word in enumerate(words)}
    for pair in merges:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "prepended":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    elif kind == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = spaces
    if kind != "spaces":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
