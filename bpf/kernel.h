/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The kernel's types as far as we read them, relocated at load (CO-RE) against the running kernel's
 * BTF. No vmlinux.h: a reader sees here each field that the exporter depends on, and each
 * difference between kernels 5.10 and 7.3 as a flavour (NAME___since) with its reason. Only of
 * types that every kernel has itself: a type that is missing sends libbpf through the BTF of all
 * modules, which needs CAP_SYS_ADMIN.
 */
#ifndef WRITEBACK_EXPORTER_KERNEL_H
#define WRITEBACK_EXPORTER_KERNEL_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

typedef _Bool bool;
#define true 1
#define false 0
#define NULL ((void *)0)

/*
 * The version that the object was built for. The exporter refuses an object of another version, for
 * it would decode the maps by names that may have changed their meaning.
 */
const char built_for[32] SEC("exporter_version") = EXPORTER_VERSION;

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

/* cgroups */

struct kernfs_node {
	__u64 id; /* st_ino of the cgroup's directory */
};

struct cgroup_root {
	int hierarchy_id; /* 0 is v2; the others are in /proc/self/cgroup */
};

struct cgroup {
	struct kernfs_node *kn;
	struct cgroup_root *root;
};

struct cgroup_subsys_state {
	struct cgroup *cgroup;
	struct cgroup_subsys_state *parent;
};

struct css_set {
	struct cgroup_subsys_state *subsys[1]; /* as many as the kernel has controllers */
};

struct task_struct {
	int pid;		      /* the thread's id */
	int exit_state;		      /* 0 until it has exited */
	unsigned int in_iowait : 1;   /* sleeps in io_schedule() */
	unsigned int in_memstall : 1; /* with CONFIG_PSI */
	struct css_set *cgroups;
	unsigned int flags;
	unsigned long nvcsw; /* times that it went to sleep */
	void *worker_private;
};

/* task_struct.worker_private holds a kernel thread's struct kthread since 5.17. */
struct task_struct___before_5_17 {
	int *set_child_tid;
};

/* The numbers depend on the kernel's configuration. */
enum cgroup_subsys_id {
	memory_cgrp_id = 1,
	io_cgrp_id = 2,
};

/* block layer */

struct blkcg {
	struct cgroup_subsys_state css;
};

struct blkcg_gq {
	struct blkcg *blkcg;
};

struct gendisk {
	int major;
	int first_minor;
	char disk_name[32];
};

struct block_device {
	struct gendisk *bd_disk;
};

struct bio {
	struct block_device *bi_bdev;
	struct blkcg_gq *bi_blkg;
};

/* bio.bi_disk gave way to bio.bi_bdev in 5.12. */
struct bio___before_5_12 {
	struct gendisk *bi_disk;
};

struct request_queue {
	struct gendisk *disk; /* since 5.15 */
};

struct request {
	struct request_queue *q;
	unsigned int cmd_flags;
	unsigned int __data_len;
	struct bio *bio;
	__u64 start_time_ns;
};

/* request.rq_disk gave way to request_queue.disk in 5.17. */
struct request___before_5_17 {
	struct gendisk *rq_disk;
};

/* waiting; of these only types that a program needs which is loaded where there are any */

struct list_head {
	struct list_head *prev;
};

struct wait_queue_head {
	struct list_head head;
};

struct wait_queue_entry {
	void *private;
	struct list_head entry;
};

/* A task's place in iocost's queue, on its stack. */
struct iocg_wait {
	struct wait_queue_entry wait;
	struct bio *bio;
};

struct ioc_gq {
	struct wait_queue_head waitq;
};

struct rq_qos {
	struct gendisk *disk;
};

/* rq_qos.q gave way to rq_qos.disk in 6.3. */
struct rq_qos___before_6_3 {
	struct request_queue *q;
};

struct rq_wait {
	struct wait_queue_head wait;
};

struct rq_wb {
	struct rq_qos rqos;
	struct rq_wait rq_wait[3];
};

struct wbt_wait_data {
	struct rq_wb *rwb;
};

/* Of a task in rq_qos_wait() that found no room, on its stack. */
struct rq_qos_wait_data {
	struct wait_queue_entry wq;
	struct rq_wait *rqw;
	void *private_data;
};

struct blkg_policy_data {
	struct blkcg_gq *blkg;
};

struct blk_iolatency {
	struct rq_qos rqos;
};

/* What io.latency knows of a cgroup on a disk; with CONFIG_BLK_CGROUP_IOLATENCY. */
struct iolatency_grp {
	struct blkg_policy_data pd;
	struct blk_iolatency *blkiolat;
	struct rq_wait rq_wait;
};

/* Before 5.15 a queue knows its disk as the directory that it has in sysfs. */
struct kobject {
	struct kobject *parent;
};

struct device {
	struct kobject kobj;
};

struct request_queue___before_5_15 {
	struct kobject kobj;
};

struct hd_struct {
	struct device __dev;
};

struct gendisk___before_5_11 {
	struct hd_struct part0;
};

/* kernel threads */

struct kthread {
	void *data;
};

struct work_struct {
	void *func;
};

struct worker {
	struct work_struct *current_work;
	char desc[24];
};

struct delayed_work {
	struct work_struct work;
};

/* writeback */

struct backing_dev_info {
	__u64 id; /* never reused, unlike the pointer */
	unsigned int capabilities;
	char dev_name[64]; /* the name in /sys/class/bdi */
};

enum wb_state {
	WB_registered,
};

struct bdi_writeback {
	struct backing_dev_info *bdi;
	unsigned long state;		   /* bits of enum wb_state */
	unsigned long avg_write_bandwidth; /* pages/s */
	struct delayed_work dwork;
	struct cgroup_subsys_state *memcg_css;
	struct cgroup_subsys_state *blkcg_css;
};

struct inode {
	struct bdi_writeback *i_wb; /* the owner's, with CONFIG_CGROUP_WRITEBACK */
};

struct address_space {
	struct inode *host;
};

struct writeback_control {
	long nr_to_write;
};

struct page {
	struct address_space *mapping;
};

/* Since 5.16; only in programs that earlier kernels do not load. */
struct folio {
	unsigned long flags;
	struct address_space *mapping;
	unsigned int _folio_nr_pages; /* of a large one */
};

/* As of 6.18, and perhaps before. */
typedef struct {
	unsigned long f;
} memdesc_flags_t;

struct folio___of_6_18 {
	memdesc_flags_t flags;
	unsigned int _nr_pages;
};

/* Renumbered by 6.12. */
enum pageflags {
	PG_head = 1,
};

/* Renumbered in 7.0: user space reads the names from the kernel's BTF. */
enum wb_reason {
	WB_REASON_BACKGROUND,
};

struct wb_writeback_work {
	long nr_pages; /* still to do; LONG_MAX where all is to be written */
	enum wb_reason reason;
};

/* Went together with BDI_CAP_WRITEBACK_ACCT, the bit below BDI_CAP_STRICTLIMIT, in 6.17. */
enum node_stat_item {
	NR_WRITEBACK_TEMP = 1,
};

/* The argument of balance_dirty_pages since 6.16; all in pages. */
struct dirty_throttle_control {
	struct dirty_throttle_control *gdtc; /* set in a memcg's domain only */
	unsigned long dirty;
	unsigned long thresh;
	unsigned long wb_dirty;
	unsigned long wb_thresh;
};

/* system calls: the caller's registers, of which each architecture has its own */

struct pt_regs___x86 {
	unsigned long orig_ax;
};

struct pt_regs___arm64 {
	int syscallno;
};

#pragma clang attribute pop

/* The id of a cgroup; 0 where there is none (NULL on the way reads as 0, it does not fault). */
static __always_inline __u64 cgroup_id(struct cgroup *cgroup)
{
	return cgroup->kn->id;
}

static __always_inline struct gendisk *request_disk(struct request *rq)
{
	struct request___before_5_17 *old = (void *)rq;

	if (bpf_core_field_exists(old->rq_disk))
		return old->rq_disk;
	return rq->q->disk;
}

/* 1 unless it is a large one. */
static __always_inline __u64 folio_pages(struct folio *folio)
{
	struct folio___of_6_18 *late = (void *)folio;
	unsigned long flags;

	if (bpf_core_field_exists(late->flags.f))
		flags = late->flags.f;
	else
		flags = folio->flags;
	if (!(flags >> bpf_core_enum_value(enum pageflags, PG_head) & 1))
		return 1;
	if (bpf_core_field_exists(late->_nr_pages))
		return late->_nr_pages;
	return folio->_folio_nr_pages;
}

/* BDI_CAP_STRICTLIMIT, a macro, which BTF does not know: bit 2 from 5.10 on, bit 1 since 6.17. */
static __always_inline bool has_strict_limit(struct backing_dev_info *bdi)
{
	if (bpf_core_enum_value_exists(enum node_stat_item, NR_WRITEBACK_TEMP))
		return bdi->capabilities & (1 << 2);
	return bdi->capabilities & (1 << 1);
}

#endif
