// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Who makes page cache dirty, and of whose inodes it is written back.
 *
 * Made dirty: the tracepoint fires where the kernel counts nr_dirtied. Written: where writeback of
 * a folio ends and the kernel counts nr_written, whoever began it: a flusher, fsync, reclaim or the
 * journal. That needs fentry; else flushers alone tell what they wrote of an inode.
 *
 * See README.md here for keys, values, kernels and cost.
 */
#include "cgroup.h"
#include "histogram.h"
#include "inherit.h"
#include "preempt.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);   /* cgroup */
	__type(value, __u64); /* pages */
} page_dirtied SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);   /* cgroup */
	__type(value, __u64); /* pages */
} page_written SEC(".maps");

enum drop {
	DROP_PAGE_DIRTIED, /* counted for OTHER_CGROUP */
	DROP_PAGE_WRITTEN, /* counted for OTHER_CGROUP */
	DROPS,
};

#include "drops.h"

static const __u64 no_pages;

static __always_inline void count_pages(void *map, enum drop reason, __u64 cgroup, __u64 pages)
{
	bool full;
	__u64 *row = cgroup_row(map, &cgroup, &cgroup, &no_pages, &full);

	if (full)
		drop(reason);
	if (row)
		add(row, pages);
}

static __always_inline int dirtied(__u64 pages)
{
	count_pages(&page_dirtied, DROP_PAGE_DIRTIED, current_cgroup(), pages);
	return 0;
}

static __always_inline int written(struct inode *inode, __u64 pages)
{
	__u64 owner = 0;

	if (bpf_core_field_exists(inode->i_wb) && bpf_core_field_exists(inode->i_wb->memcg_css))
		owner = cgroup_id(inode->i_wb->memcg_css->cgroup);
	count_pages(&page_written, DROP_PAGE_WRITTEN, owner, pages);
	return 0;
}

/* Swap is no page cache: there it has a bit that no address has (PAGE_MAPPING_ANON), or is NULL. */
static __always_inline bool is_file(struct address_space **mapping)
{
	__u64 address = 0;

	bpf_probe_read_kernel(&address, sizeof(address), mapping);
	return address && !(address & 3);
}

/* Since 5.16. */
PROGRAM("tp_btf/writeback_dirty_folio", dirtied_folio)
{
	return dirtied(folio_pages((struct folio *)ctx[0]));
}

/* Before: a page at a time. */
PROGRAM("tp_btf/writeback_dirty_page", dirtied_page)
{
	return dirtied(1);
}

/* Since 5.16. */
PROGRAM("fentry/__folio_end_writeback", written_folio)
{
	struct folio *folio = (struct folio *)ctx[0];

	if (!is_file(&folio->mapping))
		return 0;
	return written(folio->mapping->host, folio_pages(folio));
}

/* Before. */
PROGRAM("fentry/test_clear_page_writeback", written_page)
{
	struct page *page = (struct page *)ctx[0];

	if (!is_file(&page->mapping))
		return 0;
	return written(page->mapping->host, 1);
}

/* Where fentry is refused. */
PROGRAM("tp_btf/writeback_single_inode", written_inode)
{
	struct inode *inode = (struct inode *)ctx[0];
	struct writeback_control *wbc = (struct writeback_control *)ctx[1];
	__s64 pages = ctx[2] - wbc->nr_to_write;

	return pages > 0 ? written(inode, pages) : 0;
}

INHERIT(page_dirtied, __u64, __u64, ADD_ROW)
INHERIT(page_written, __u64, __u64, ADD_ROW)
