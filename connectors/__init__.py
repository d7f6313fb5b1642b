"""vLLM KV connectors that keep evicted blocks of hybrid models outside the GPU, group by group.

Importing this package imports nothing else: vLLM imports connector modules in processes that never touch a
device, and ``connectors.transfer`` must run where there is torch, triton and numpy but no vLLM.
"""
