// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * What the kernel's statistics say of programs that do nothing: the part of every other figure that
 * no program can avoid.
 */
#include "../../bpf/kernel.h"

#define NOTHING(event)                  \
	SEC("tp_btf/block_rq_" #event)  \
	int nothing_##event(__u64 *ctx) \
	{                               \
		return 0;               \
	}

NOTHING(insert)
NOTHING(issue)
NOTHING(complete)

SEC("tp_btf/balance_dirty_pages")
int nothing_throttled(__u64 *ctx)
{
	return 0;
}

SEC("tp_btf/sched_switch")
int nothing_switched(__u64 *ctx)
{
	return 0;
}
