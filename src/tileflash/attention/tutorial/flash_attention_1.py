"""FlashAttention (Dao, Fu, Ermon, Rudra, Re 2022, arXiv:2205.14135): Algorithms 1, 2 and 4, line by line.

A slice that is read, `Q[rows]`, is a load from HBM to on-chip SRAM; a slice that is written, `O[rows] = ...`, a store to HBM. All else
happens on chip. The outer loop walks over blocks of K and V, the inner one over blocks of Q.
"""

import torch
from torch import Tensor

from tileflash.attention.tutorial.blocks import Mask, blocks, finite, nonzero, visible_block
from tileflash.attention.tutorial.dropout import RandomState, dropout_mask


def forward_plain(Q: Tensor, K: Tensor, V: Tensor, *, B_r: int, B_c: int) -> Tensor:
    """Algorithm 1: O = softmax(Q K^T) V [N, d_v] of Q [N, d], K [N_k, d], V [N_k, d_v]. No scale, mask or dropout."""
    O = Q.new_zeros(Q.shape[0], V.shape[1])  # line 2
    ell = Q.new_zeros(Q.shape[0], 1)
    m = Q.new_full((Q.shape[0], 1), -torch.inf)
    for columns in blocks(K.shape[0], B_c):  # line 5: for 1 <= j <= T_c
        K_j, V_j = K[columns], V[columns]  # line 6
        for rows in blocks(Q.shape[0], B_r):  # line 7: for 1 <= i <= T_r
            Q_i, O_i, ell_i, m_i = Q[rows], O[rows], ell[rows], m[rows]  # line 8
            S_ij = Q_i @ K_j.T  # line 9: [B_r, B_c]
            m_tilde = S_ij.amax(1, keepdim=True)  # line 10
            P_tilde = torch.exp(S_ij - m_tilde)
            ell_tilde = P_tilde.sum(1, keepdim=True)
            m_new = torch.maximum(m_i, m_tilde)  # line 11
            ell_new = torch.exp(m_i - m_new) * ell_i + torch.exp(m_tilde - m_new) * ell_tilde
            O[rows] = (  # line 12: what was there is brought to the new maximum and the new sum
                ell_i * torch.exp(m_i - m_new) * O_i + torch.exp(m_tilde - m_new) * (P_tilde @ V_j)
            ) / ell_new
            ell[rows], m[rows] = ell_new, m_new  # line 13
    return O  # line 16


def forward(
    Q: Tensor, K: Tensor, V: Tensor, *, B_r: int, B_c: int,
    tau: float | None = None, mask: Mask | None = None, p_drop: float = 0.0, R: RandomState = (0, 0, 0, 0),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Algorithm 2: Algorithm 1 with the scale `tau` (1 / sqrt(d) unless given), a mask and dropout.

    O [N, d_v], and for the backward pass ell [N, 1] and m [N, 1]. Line 1, R, is the caller's: `random_state(seed, ...)`. A row that sees
    no key has O = 0, ell = 0 and m = -inf.
    """
    tau = Q.shape[1] ** -0.5 if tau is None else tau
    O = Q.new_zeros(Q.shape[0], V.shape[1])  # line 3
    ell = Q.new_zeros(Q.shape[0], 1)
    m = Q.new_full((Q.shape[0], 1), -torch.inf)
    for columns in blocks(K.shape[0], B_c):  # line 6: for 1 <= j <= T_c
        K_j, V_j = K[columns], V[columns]  # line 7
        for rows in blocks(Q.shape[0], B_r):  # line 8: for 1 <= i <= T_r
            visible = visible_block(mask, rows, columns, Q.device)
            if not visible.any():
                continue  # the block adds nothing (the paper's Algorithm 5)
            Q_i, O_i, ell_i, m_i = Q[rows], O[rows], ell[rows], m[rows]  # line 9
            S_ij = tau * (Q_i @ K_j.T)  # line 10: [B_r, B_c]
            S_masked = S_ij.masked_fill(~visible, -torch.inf)  # line 11
            m_tilde = S_masked.amax(1, keepdim=True)  # line 12
            P_tilde = torch.exp(S_masked - finite(m_tilde))
            ell_tilde = P_tilde.sum(1, keepdim=True)
            m_new = torch.maximum(m_i, m_tilde)  # line 13
            old, new = torch.exp(m_i - finite(m_new)), torch.exp(m_tilde - finite(m_new))
            ell_new = old * ell_i + new * ell_tilde
            P_dropped = P_tilde * dropout_mask(R, p_drop, rows, columns, Q)  # line 14: ell counts dropped keys too
            O[rows] = (ell_i * old * O_i + new * (P_dropped @ V_j)) / nonzero(ell_new)  # line 15
            ell[rows], m[rows] = ell_new, m_new  # line 16
    return O, ell, m  # line 19


def backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, ell: Tensor, m: Tensor, *, B_r: int, B_c: int,
    tau: float | None = None, mask: Mask | None = None, p_drop: float = 0.0, R: RandomState = (0, 0, 0, 0),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Algorithm 4: dQ, dK, dV. O, ell and m are the forward pass's, dO [N, d_v] the gradient of O; tau, mask, p_drop and R as there."""
    tau = Q.shape[1] ** -0.5 if tau is None else tau
    dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)  # line 5
    for columns in blocks(K.shape[0], B_c):  # line 6: for 1 <= j <= T_c
        K_j, V_j = K[columns], V[columns]  # line 7
        dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)  # line 8
        for rows in blocks(Q.shape[0], B_r):  # line 9: for 1 <= i <= T_r
            visible = visible_block(mask, rows, columns, Q.device)
            if not visible.any():
                continue
            Q_i, O_i, dO_i, dQ_i, ell_i, m_i = Q[rows], O[rows], dO[rows], dQ[rows], ell[rows], m[rows]  # line 10
            S_ij = tau * (Q_i @ K_j.T)  # line 11: made again, for P was not kept
            S_masked = S_ij.masked_fill(~visible, -torch.inf)  # line 12
            P_ij = torch.exp(S_masked - finite(m_i)) / nonzero(ell_i)  # line 13: the final weights
            Z_ij = dropout_mask(R, p_drop, rows, columns, Q)  # line 14: the same as in the forward pass
            P_dropped = P_ij * Z_ij  # line 15
            dV_j = dV_j + P_dropped.T @ dO_i  # line 16
            dP_dropped = dO_i @ V_j.T  # line 17
            dP_ij = dP_dropped * Z_ij  # line 18
            D_i = (dO_i * O_i).sum(1, keepdim=True)  # line 19
            dS_ij = P_ij * (dP_ij - D_i)  # line 20
            dQ[rows] = dQ_i + tau * (dS_ij @ K_j)  # line 21
            dK_j = dK_j + tau * (dS_ij.T @ Q_i)  # line 22
        dK[columns], dV[columns] = dK_j, dV_j  # line 24
    return dQ, dK, dV  # line 26
