"""DeepSpeed at any stage; all micro-batches have equal weight."""

import deepspeed
import torch
from text import BATCH, Model, Sentences, options
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

args = options()
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
data, model = Sentences(), Model()
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": args.accumulate,
    "zero_optimization": {"stage": args.stage},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": args.bf16},
    "gradient_clipping": 1.0,
}
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config=config,
    dist_init_required=False,
)
for batch in DataLoader(data, BATCH, sampler=DistributedSampler(data)):
    tokens = batch["input_ids"]
    loss = nn.functional.cross_entropy(
        engine(tokens).flatten(0, 1).float(), (3 * tokens + 1).flatten() % 32
    )
    engine.backward(loss)
    engine.step()
