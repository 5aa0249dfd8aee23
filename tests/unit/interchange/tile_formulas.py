"""Where nunchaku's tiles put each number, by flat formulas."""

import torch

N, K, R = 256, 384, 48


ROW, COLUMN, GROUP, MICRO, RANK = (torch.arange(size) for size in (N, K, K // 64, K // 16, R))


def word(n, k, columns: int = K):
    """The place of an int32 of eight codes."""
    place = ((n // 128 * (columns // 64) + k // 64) * 8 + n % 128 // 16) * 8 + n % 8
    return (place * 4 + k % 32 // 8) * 4 + n % 16 // 8 * 2 + k % 64 // 32


def in_sixteens(outer, r, inner_outer, inner, rank: int = R):
    """The place of a number of the branch, whose tiles are 16 by 16."""
    place = ((outer // 16 * (rank // 16) + r // 16) * 8 + inner_outer % 8) * 4 + inner % 8 // 2
    return ((place * 2 + inner_outer % 16 // 8) * 2 + inner % 16 // 8) * 2 + inner % 2


def scale(n, g, groups: int = K // 64):
    """The place of a scale of INT4, and of a number of a vector, whose group is one."""
    place = ((n // 128 * groups + g) * 8 + n % 128 // 16) * 4 + n % 8 // 2
    return (place * 2 + n % 16 // 8) * 2 + n % 2


def micro_scale(n, g, columns: int = K):
    place = ((n // 128 * (columns // 64) + g // 4) * 8 + n % 8) * 4 + n % 32 // 8
    return (place * 4 + n % 128 // 32) * 4 + g % 4


def awq(n, k):
    """The place of a code: an int16 has four."""
    place = (n // 4 * (K // 64) + k // 64) * 4 + n % 4
    return ((place * 2 + k % 64 // 32) * 8 + k % 8) * 4 + k % 32 // 8
