// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Which processes made an io_uring with a thread that polls its submission queue (SQPOLL). How long
 * that thread ran and worked is in the ring's fdinfo, where user space looks for these processes
 * only.
 *
 * See README.md here for keys, values, kernels and cost.
 */
#include "cgroup.h"
#include "histogram.h"
#include "preempt.h"

#define IORING_SETUP_SQPOLL (1U << 1) /* include/uapi/linux/io_uring.h */

struct ring_owner {
	__u64 made;   /* rings, so far */
	__u64 cgroup; /* of the process when it made the first */
};

/* By process (tgid). User space deletes those that have no ring any more. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct ring_owner);
} ring_owners SEC(".maps");

enum drop {
	DROP_RING_OWNERS, /* its rings are not seen */
	DROPS,
};

#include "drops.h"

/* (int fd, void *ring, u32 sq_entries, u32 cq_entries, u32 flags), 5.10 to 7.3 */
PROGRAM("tp_btf/io_uring_create", io_uring_create)
{
	__u32 flags = ctx[4], process = bpf_get_current_pid_tgid() >> 32;
	struct ring_owner *owner, first = {}; /* with a number in it clang 19 makes it a map's */

	if (!(flags & IORING_SETUP_SQPOLL))
		return 0;
	owner = bpf_map_lookup_elem(&ring_owners, &process);
	if (owner) {
		add(&owner->made, 1);
		return 0;
	}
	first.made = 1;
	first.cgroup = current_cgroup();
	if (bpf_map_update_elem(&ring_owners, &process, &first, BPF_ANY))
		drop(DROP_RING_OWNERS);
	return 0;
}
