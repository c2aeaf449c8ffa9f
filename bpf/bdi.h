/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a program counts by BDI. Include it after drops.h, with DROP_BDIS among its reasons, and
 * after `struct bdi`: a row, which begins with the BDI's name and may be larger than the stack.
 */
#ifndef WRITEBACK_EXPORTER_BDI_H
#define WRITEBACK_EXPORTER_BDI_H

#include "kernel.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __u64); /* bdi->id */
	__type(value, struct bdi);
} bdis SEC(".maps");

/* A BDI to be entered: zero but for the name. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct bdi);
} new_bdi SEC(".maps");

/*
 * The row of a BDI, made if need be; NULL where the map is full. Its name is read at first sight,
 * so that a device that goes before anybody looks has its name too.
 */
static __always_inline struct bdi *bdi_row(struct backing_dev_info *kernel_bdi)
{
	__u64 id = kernel_bdi->id;
	struct bdi *row = bpf_map_lookup_elem(&bdis, &id), *empty;
	__u32 zero = 0;

	if (row)
		return row;
	empty = bpf_map_lookup_elem(&new_bdi, &zero);
	if (!empty)
		return NULL;
	bpf_probe_read_kernel_str(empty->name, sizeof(empty->name), kernel_bdi->dev_name);
	bpf_map_update_elem(&bdis, &id, empty, BPF_NOEXIST);
	row = bpf_map_lookup_elem(&bdis, &id);
	if (!row)
		drop(DROP_BDIS);
	return row;
}

#endif
