/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Rows that go and have an heir: that of a service's old cgroup when the service was started again,
 * or of a disk that was plugged in anew. User space runs these programs (BPF_PROG_TEST_RUN): the
 * heir has all and the old row is gone in one step that no signal interrupts, so that whoever kills
 * the exporter finds what was counted in one of the two, and once.
 */
#ifndef WRITEBACK_EXPORTER_INHERIT_H
#define WRITEBACK_EXPORTER_INHERIT_H

#include "histogram.h"

/* Adds `size` bytes of 64 bit counters. */
static __always_inline void add_counters(void *heir, const void *row, __u32 size)
{
	__u64 *to = heir;
	const __u64 *from = row;

#pragma clang loop unroll(full)
	for (__u32 i = 0; i < size / sizeof(*from); i++)
		add(&to[i], from[i]);
}

/* The first arguments, `size` bytes. */
static __always_inline void get_arguments(struct bpf_raw_tracepoint_args *ctx, void *words,
					  __u32 size)
{
#pragma clang loop unroll(full)
	for (__u32 i = 0; i < size / sizeof(ctx->args[0]); i++)
		((__u64 *)words)[i] = ctx->args[i];
}

/*
 * The program MAP_inherit of a hash map. Its arguments are the words of two keys: of the row that
 * goes and of its heir, which gets it as it is if it has no row yet. 0 where that finds no room,
 * and then nothing has changed. ADD(heir, row) adds what counts.
 */
#define INHERIT(map, type_of_key, type_of_row, ADD)                                   \
	SEC("raw_tp")                                                                 \
	int map##_inherit(struct bpf_raw_tracepoint_args *ctx)                        \
	{                                                                             \
		type_of_key keys[2];                                                  \
		type_of_row *row, *heir;                                              \
                                                                                      \
		get_arguments(ctx, keys, sizeof(keys));                               \
		row = bpf_map_lookup_elem(&map, &keys[0]);                            \
		if (!row)                                                             \
			return 1;                                                     \
		heir = bpf_map_lookup_elem(&map, &keys[1]);                           \
		if (!heir && bpf_map_update_elem(&map, &keys[1], row, BPF_NOEXIST)) { \
			/* No room; or it has one by now. */                          \
			heir = bpf_map_lookup_elem(&map, &keys[1]);                   \
			if (!heir)                                                    \
				return 0;                                             \
		}                                                                     \
		if (heir)                                                             \
			ADD(heir, row);                                               \
		bpf_map_delete_elem(&map, &keys[0]);                                  \
		return 1;                                                             \
	}

/* A row that is nothing but counters. */
#define ADD_ROW(heir, row) add_counters(heir, row, sizeof(*(row)))

#endif
