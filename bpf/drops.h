/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Events that found no room, counted by what was full. Include it after `enum drop`, which names
 * each full map as DROP_MAP and ends with DROPS; user space exports exporter_map_dropped_total{map}
 * under those names.
 */
#ifndef WRITEBACK_EXPORTER_DROPS_H
#define WRITEBACK_EXPORTER_DROPS_H

struct drop_counts {
	enum drop reasons[0];
	__u64 count[DROPS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct drop_counts);
} drops SEC(".maps");

static __always_inline void drop(enum drop reason)
{
	__u32 zero = 0;
	struct drop_counts *counts = bpf_map_lookup_elem(&drops, &zero);

	if (counts)
		__atomic_fetch_add(&counts->count[reason], 1, __ATOMIC_RELAXED);
}

#endif
