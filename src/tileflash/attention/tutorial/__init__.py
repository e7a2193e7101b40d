"""FlashAttention 1 and 2 in plain PyTorch, for reading: forward and backward, with masks and dropout. No part of the library calls it.

Read `flash_attention_1.forward_plain` first, then the rest of that file, then `flash_attention_2` and `heads`. docs/tutorial.md walks
through all of it. Names are the papers' own: matrices in capitals, `_i` a block of queries, `_j` a block of keys, `_tilde` not yet final,
`ell` the letter l, `tau` the softmax scale, `B_r` and `B_c` the rows and columns of a block. The papers write N for both lengths; here K
and V may have another number of rows than Q. Vectors of R^N are columns [N, 1], so that the papers' diag(x) A is x * A.
"""
