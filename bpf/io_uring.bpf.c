// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Which processes made an io_uring with a thread that polls its submission queue (SQPOLL). How long
 * that thread ran and worked is in the ring's fdinfo, where user space looks for these processes
 * only.
 *
 * See README.md here for keys, values, kernels and cost.
 */
#include "kernel.h"

#define IORING_SETUP_SQPOLL (1U << 1) /* include/uapi/linux/io_uring.h */

/* Process (tgid) -> rings that it made. User space deletes those that have none any more. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u64);
} ring_owners SEC(".maps");

enum drop {
	DROP_RING_OWNERS, /* its rings are not seen */
	DROPS,
};

#include "drops.h"

/* (int fd, void *ring, u32 sq_entries, u32 cq_entries, u32 flags), 5.10 to 7.3 */
SEC("tp_btf/io_uring_create")
int io_uring_create(__u64 *ctx)
{
	__u32 flags = ctx[4], process = bpf_get_current_pid_tgid() >> 32;
	__u64 one = 1, *rings;

	if (!(flags & IORING_SETUP_SQPOLL))
		return 0;
	rings = bpf_map_lookup_elem(&ring_owners, &process);
	if (rings)
		__atomic_fetch_add(rings, 1, __ATOMIC_RELAXED);
	else if (bpf_map_update_elem(&ring_owners, &process, &one, BPF_ANY))
		drop(DROP_RING_OWNERS);
	return 0;
}
