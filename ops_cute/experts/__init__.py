"""The experts of a sparse layer: three kernels with one contract, and what each of them is made of.

``moe_experts`` (1 to 8 rows) and ``moe_experts_gathered`` (9 to 64) multiply on ``mma.sync``, from sm_90a on;
``moe_experts_block_scaled`` (and ``block_scaled_*``) on the tensor cores of sm_100a and sm_103a. ``call`` reads a call
for all three.
"""
