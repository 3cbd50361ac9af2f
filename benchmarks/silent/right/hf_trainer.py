"""HF Trainer on a small Llama, which divides by the tokens of all ranks and micro-batches."""

import tempfile

from text import BATCH, VOCABULARY, Sentences, options
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

args = options()
set_seed(0)
shape = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **shape))
given = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=3,
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=args.accumulate,
    bf16=args.bf16,
    learning_rate=1e-2,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
)
Trainer(model=model, args=given, train_dataset=Sentences()).train()
