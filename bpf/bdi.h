/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Maps by BDI, whose rows begin with its name. */
#ifndef WRITEBACK_EXPORTER_BDI_H
#define WRITEBACK_EXPORTER_BDI_H

#include "kernel.h"

#define BDI_NAME_LENGTH 64

/*
 * The row of a BDI in a map by bdi->id, made if need be; NULL where the map is full. Its name is
 * read at first sight, so that a device that goes before anybody looks has its name too. A new row
 * may be larger than the stack: `fresh` is a per-CPU array with one, zero but for the name.
 */
static __always_inline void *bdi_row(void *bdis, void *fresh, struct backing_dev_info *bdi)
{
	__u64 id = bdi->id;
	void *row = bpf_map_lookup_elem(bdis, &id), *empty;
	__u32 zero = 0;

	if (row)
		return row;
	empty = bpf_map_lookup_elem(fresh, &zero);
	if (!empty)
		return NULL;
	bpf_probe_read_kernel_str(empty, BDI_NAME_LENGTH, bdi->dev_name);
	bpf_map_update_elem(bdis, &id, empty, BPF_NOEXIST);
	return bpf_map_lookup_elem(bdis, &id);
}

#endif
