"""FlashAttention-2 (Dao 2023, arXiv:2307.08691): Algorithms 1 and 2, line by line.

Loads and stores as in `flash_attention_1`. The outer loop of the forward pass walks over blocks of Q: what belongs to a query (O, m, ell)
stays on chip until it is final, and each block of queries can be another worker's. The paper's listings leave out the scale, the mask and
dropout; they stand here where FlashAttention 1 has them.
"""

import torch
from torch import Tensor

from tileflash.attention.tutorial.blocks import Mask, blocks, finite, nonzero, visible_block
from tileflash.attention.tutorial.dropout import RandomState, dropout_mask


def forward(
    Q: Tensor, K: Tensor, V: Tensor, *, B_r: int, B_c: int,
    tau: float | None = None, mask: Mask | None = None, p_drop: float = 0.0, R: RandomState = (0, 0, 0, 0),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Algorithm 1: O [N, d_v] and the log-sum-exp L [N, 1] of Q [N, d], K [N_k, d], V [N_k, d_v].

    `tau` is 1 / sqrt(d) unless given. A row that sees no key has O = 0 and L = -inf.
    """
    tau = Q.shape[1] ** -0.5 if tau is None else tau
    O = Q.new_empty(Q.shape[0], V.shape[1])
    L = Q.new_empty(Q.shape[0], 1)
    for rows in blocks(Q.shape[0], B_r):  # line 3: for 1 <= i <= T_r
        Q_i = Q[rows]  # line 4
        O_i = Q_i.new_zeros(Q_i.shape[0], V.shape[1])  # line 5
        ell_i = Q_i.new_zeros(Q_i.shape[0], 1)
        m_i = Q_i.new_full((Q_i.shape[0], 1), -torch.inf)
        for columns in blocks(K.shape[0], B_c):  # line 6: for 1 <= j <= T_c
            visible = visible_block(mask, rows, columns, Q.device)
            if not visible.any():
                continue  # section 3.1, "Causal masking"
            K_j, V_j = K[columns], V[columns]  # line 7
            S_ij = (tau * (Q_i @ K_j.T)).masked_fill(~visible, -torch.inf)  # line 8: [B_r, B_c]
            m_new = torch.maximum(m_i, S_ij.amax(1, keepdim=True))  # line 9
            P_tilde = torch.exp(S_ij - finite(m_new))
            old = torch.exp(m_i - finite(m_new))
            ell_i = old * ell_i + P_tilde.sum(1, keepdim=True)
            P_dropped = P_tilde * dropout_mask(R, p_drop, rows, columns, Q)
            O_i = old * O_i + P_dropped @ V_j  # line 10: not divided yet
            m_i = m_new
        O[rows] = O_i / nonzero(ell_i)  # lines 12 and 14: the one division
        L[rows] = m_i + torch.log(ell_i)  # lines 13 and 15: -inf + log(0) = -inf for a row that saw no key
    return O, L  # line 17


def backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, L: Tensor, *, B_r: int, B_c: int,
    tau: float | None = None, mask: Mask | None = None, p_drop: float = 0.0, R: RandomState = (0, 0, 0, 0),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Algorithm 2: dQ, dK, dV. O and L are the forward pass's, dO [N, d_v] the gradient of O; tau, mask, p_drop and R as there."""
    tau = Q.shape[1] ** -0.5 if tau is None else tau
    dQ, dK, dV = torch.zeros_like(Q), torch.empty_like(K), torch.empty_like(V)  # line 3
    D = (dO * O).sum(1, keepdim=True)  # line 4: once for each row, not once for each block
    for columns in blocks(K.shape[0], B_c):  # line 5: for 1 <= j <= T_c
        K_j, V_j = K[columns], V[columns]  # line 6
        dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)  # line 7
        for rows in blocks(Q.shape[0], B_r):  # line 8: for 1 <= i <= T_r
            visible = visible_block(mask, rows, columns, Q.device)
            if not visible.any():
                continue
            Q_i, dO_i, L_i, D_i = Q[rows], dO[rows], L[rows], D[rows]  # line 9
            S_ij = (tau * (Q_i @ K_j.T)).masked_fill(~visible, -torch.inf)  # line 10: made again
            P_ij = torch.exp(S_ij - finite(L_i))  # line 11: exp(S - m) / ell in one step
            Z_ij = dropout_mask(R, p_drop, rows, columns, Q)
            dV_j = dV_j + (P_ij * Z_ij).T @ dO_i  # line 12
            dP_ij = (dO_i @ V_j.T) * Z_ij  # line 13
            dS_ij = P_ij * (dP_ij - D_i)  # line 14
            dQ[rows] = dQ[rows] + tau * (dS_ij @ K_j)  # line 15: every j adds here; workers would need atomic additions
            dK_j = dK_j + tau * (dS_ij.T @ Q_i)  # line 16
        dK[columns], dV[columns] = dK_j, dV_j  # line 18
    return dQ, dK, dV  # line 20
