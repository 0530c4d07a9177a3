"""A Hugging Face task: ``steadygrad advise examples/my_hf_task.py:make_task``.

Here a random GPT-2 of two layers counts upwards: nothing is downloaded. For a model of your own
put ``AutoModelForCausalLM.from_pretrained(...)`` and a tokenized ``datasets.Dataset`` in its place.
"""

from transformers import GPT2Config, GPT2LMHeadModel

from steadygrad.tasks import Task

WORDS, LENGTH = 64, 16


def make_model() -> GPT2LMHeadModel:
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes))


def counting(first: int, count: int) -> list[dict[str, list[int]]]:
    """Rows such as 5, 8, 11, ...: a list of mappings serves as a data set."""
    return [
        {"input_ids": [(i + step * (1 + i % 5)) % WORDS for step in range(LENGTH)]}
        for i in range(first, first + count)
    ]


def make_task() -> Task:
    return Task.from_hf(
        make_model,
        counting(0, 4_096),
        valid=counting(4_096, 256),
        lr=1e-3,  # for batches of 8, by AdamW; studies search around it
        batch_size=8,
        objective="causal-lm",
    )
