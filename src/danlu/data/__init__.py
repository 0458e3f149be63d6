"""Layer 1: from files to packed rows to micro-batches. Never imports the model.

`sources` and `forms` read what people have; `tokenizer`, `packing` and `shards` turn it into rows; `build` runs them in
parallel; `dataset`, `order` and `loader` give the rows back as the batches of a training run. Building imports no
torch, so its worker processes start fast.
"""
