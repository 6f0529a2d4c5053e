// SPDX-License-Identifier: GPL-2.0
/*
 * Pools: per node, huge pages that are held reserved. A page that comes back from a buffer is dirty until it has been
 * scrubbed, in the background by a work on the node's CPUs, or at once when it is wanted and no clean one is left. A
 * page that is new from the system is clean: the allocator has cleared it.
 *
 * A pool has a target. What it holds (free, in buffers, orphans) grows towards it when it is set, and shrinks towards
 * it as pages come back. Pages of buffers are never taken away.
 *
 * A page that somebody has pinned when its buffer dies (a transfer that is under way, io_uring's late release) is an
 * orphan. It isn't used again before theirs is the last reference but ours, and until then it is charged to the session
 * that made the buffer: else one could have any amount of memory by pinning a byte of each buffer and closing it. A
 * work looks every second, while there are orphans.
 */
#include <linux/completion.h>
#include <linux/cpuset.h>
#include <linux/gfp.h>
#include <linux/highmem.h>
#include <linux/module.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/workqueue.h>
#include "offstage.h"
#include "compat.h"
#define CREATE_TRACE_POINTS
#include "trace.h"

#define FILLERS_PER_NODE 4	/* clearing saturates a node's memory with a few */
#define SCRUB_BATCH 8		/* pages; who waits for the scrubber waits for no more of them */

struct pool {
	int node;

	spinlock_t lock;	/* guards what follows */
	struct list_head clean, dirty;	/* free huge pages, by folio.lru */
	struct list_head orphans;	/* huge and base pages; private: the session, and ORPHAN_FROM_POOL */
	unsigned long target;	/* huge pages */
	unsigned long held;	/* free, in buffers, orphans, and being allocated for the pool */
	unsigned long free;	/* clean, dirty, and in the scrubber's hands */
	unsigned long n_dirty;
	u64 in_use, from_system;	/* bytes in buffers: all, and those not of the pool */
	u64 orphaned, failed;

	struct work_struct scrub;
	struct delayed_work reap;
};

#define ORPHAN_FROM_POOL 1ul

static struct pool *pools[MAX_NUMNODES];
static struct workqueue_struct *works;	/* unbound: a work runs on the CPUs of its node */

static void clear_page_whole(struct page *page)
{
	unsigned long i;

	for (i = 0; i < HUGE_PAGES; i++) {
		clear_highpage(page + i);
		if (i % 64 == 63)
			cond_resched();
	}
}

/*
 * GFP_KERNEL, not GFP_HIGHUSER_MOVABLE: pages that devices reach can't move. Charged to the caller's memory cgroup when
 * it is on a user's behalf. __GFP_RETRY_MAYFAIL: nobody is killed for it, in that cgroup or elsewhere. Without `hard`,
 * no reclaim and no compaction in the caller.
 */
static struct page *from_system(int node, unsigned int order, bool hard, bool charge)
{
	gfp_t gfp = GFP_KERNEL | __GFP_ZERO | __GFP_THISNODE | __GFP_NOWARN | __GFP_RETRY_MAYFAIL;

	if (order)
		gfp |= __GFP_COMP;
	if (charge)
		gfp |= __GFP_ACCOUNT;
	if (!hard)
		gfp &= ~__GFP_DIRECT_RECLAIM;
	return alloc_pages_node(node, gfp, order);
}

static struct page *first(struct list_head *list)
{
	struct folio *folio = list_first_entry_or_null(list, struct folio, lru);

	return folio ? &folio->page : NULL;
}

/*
 * Hardware can't correct an error in this memory, and the kernel knows it. Clearing it would crash the machine, and the
 * system would hand it out again: whoever meets it leaves it alone for ever, with the reference that was ours.
 */
static bool has_failed(struct page *page)
{
	unsigned long i, n = 1ul << compound_order(page);

	for (i = 0; i < n && !PageHWPoison(page + i); i++)
		;
	return i < n;
}

/* ---- scrubbing ---- */

static void scrub(struct work_struct *work)
{
	struct pool *pool = container_of(work, struct pool, scrub);
	unsigned long n = 0;
	struct page *page;
	bool failed, more;

	spin_lock(&pool->lock);
	while (n < SCRUB_BATCH && (page = first(&pool->dirty))) {
		list_del(&page_folio(page)->lru);
		spin_unlock(&pool->lock);
		failed = has_failed(page);
		if (!failed)
			clear_page_whole(page);
		n++;
		spin_lock(&pool->lock);
		pool->n_dirty--;
		if (failed) {
			pool->free--;
			pool->held--;
		} else {
			list_add(&page_folio(page)->lru, &pool->clean);
		}
	}
	more = !list_empty(&pool->dirty);
	spin_unlock(&pool->lock);
	if (n)
		trace_offstage_scrub(pool->node, n);
	if (more)
		queue_work_node(pool->node, works, &pool->scrub);
}

/* ---- taking and giving ---- */

static int has_normal_memory(int node)
{
	if (node < 0 || node >= MAX_NUMNODES || !node_state(node, N_MEMORY))
		return -ENODEV;
	/* Allocation on a node that is movable only would fail, or worse, go elsewhere. */
	return node_state(node, N_NORMAL_MEMORY) && pools[node] ? 0 : -EOPNOTSUPP;
}

int pool_node_check(int node)
{
	int ret = has_normal_memory(node);

	return ret ?: node_isset(node, cpuset_current_mems_allowed) ? 0 : -EXDEV;
}

static struct page *take_from_pool(struct pool *pool)
{
	bool dirty, in_hands;
	struct page *page;

again:
	dirty = false;
	in_hands = false;
	spin_lock(&pool->lock);
	page = first(&pool->clean);
	if (!page) {
		page = first(&pool->dirty);
		dirty = page;
	}
	if (page) {
		list_del(&page_folio(page)->lru);
		pool->free--;
		if (dirty)
			pool->n_dirty--;
		pool->in_use += PMD_SIZE;
	} else {
		in_hands = pool->free;
	}
	spin_unlock(&pool->lock);
	/* The last free page is being scrubbed right now: it is there in a moment. */
	if (in_hands) {
		flush_work(&pool->scrub);
		goto again;
	}
	if (page && has_failed(page)) {
		spin_lock(&pool->lock);
		pool->in_use -= PMD_SIZE;
		pool->held--;
		spin_unlock(&pool->lock);
		goto again;
	}
	if (dirty)
		clear_page_whole(page);
	return page;
}

/* Bytes that are the system's no more: of pools, and of buffers beside them. Others change it meanwhile. */
static u64 taken_from_system(void)
{
	u64 sum = 0;
	int node;

	for_each_node_state(node, N_MEMORY)
		sum += ((u64)READ_ONCE(pools[node]->held) << PMD_SHIFT) + READ_ONCE(pools[node]->from_system);
	return sum;
}

/*
 * A page for a buffer from the system, within the node's limit; and within that of all, in which pools count here: what
 * they hold and nobody uses is as little there for the rest of the machine.
 */
static struct page *take_from_system(struct pool *pool, unsigned int order, bool hard)
{
	u64 bytes = PAGE_SIZE << order, limit = READ_ONCE(limit_node);
	u64 all = READ_ONCE(limit_all);
	struct page *page;

	if (all && taken_from_system() + bytes > all)
		return ERR_PTR(-EUSERS);
	spin_lock(&pool->lock);
	if (limit && pool->from_system + bytes > limit) {
		spin_unlock(&pool->lock);
		return ERR_PTR(-EDQUOT);
	}
	pool->from_system += bytes;
	pool->in_use += bytes;
	spin_unlock(&pool->lock);
	page = from_system(pool->node, order, hard, true);
	if (page)
		return page;
	spin_lock(&pool->lock);
	pool->from_system -= bytes;
	pool->in_use -= bytes;
	if (order)
		pool->failed += bytes;
	spin_unlock(&pool->lock);
	return ERR_PTR(-ENOMEM);
}

struct page *pool_take(int node, bool pool_only, bool hard, bool *from_pool)
{
	struct pool *pool = pools[node];
	struct page *page = take_from_pool(pool);

	*from_pool = page;
	if (page)
		return page;
	return pool_only ? ERR_PTR(-ENOMEM) : take_from_system(pool, HUGE_ORDER, hard);
}

struct page *pool_take_base(int node)
{
	return take_from_system(pools[node], 0, true);
}

/* With the lock held: nobody else has the page any more. true: it is the pool's again, dirty; false: the system's. */
static bool take_back(struct pool *pool, struct page *page, u64 bytes, bool from_pool, bool failed)
{
	if (!from_pool) {
		pool->from_system -= bytes;
		return false;
	}
	if (failed || pool->held > pool->target) {
		pool->held--;
		return false;
	}
	list_add_tail(&page_folio(page)->lru, &pool->dirty);
	pool->n_dirty++;
	pool->free++;
	return true;
}

/* And without the lock: what take_back() has decided is done. Memory that has failed goes nowhere. */
static void send_back(struct pool *pool, struct page *page, bool kept, bool failed)
{
	if (kept)
		queue_work_node(pool->node, works, &pool->scrub);
	else if (!failed)
		put_page(page);
}

bool pool_give(struct page *page, bool from_pool, struct session *session)
{
	struct pool *pool = pools[page_to_nid(page)];
	u64 bytes = PAGE_SIZE << compound_order(page);
	bool failed = has_failed(page), orphan, kept = false;

	/* Nothing reads it any more, but finish_fault() of the next owner's buffer would. */
	page_folio(page)->index = 0;
	spin_lock(&pool->lock);
	pool->in_use -= bytes;
	orphan = page_ref_count(page) != 1;
	if (orphan) {
		kref_get(&session->ref);
		set_page_private(page, (unsigned long)session | (from_pool ? ORPHAN_FROM_POOL : 0));
		list_add_tail(&page_folio(page)->lru, &pool->orphans);
		pool->orphaned += bytes;
	} else {
		kept = take_back(pool, page, bytes, from_pool, failed);
	}
	spin_unlock(&pool->lock);
	if (orphan)
		queue_delayed_work(works, &pool->reap, HZ);
	else
		send_back(pool, page, kept, failed);
	return !orphan;
}

/*
 * An orphan that is in no list any more ends, here or with its last reference. Its session may have as much again
 * before the counts say so: who sees none orphaned isn't refused for what was.
 */
static void end_orphan(struct pool *pool, struct page *page)
{
	struct session *session = (struct session *)(page_private(page) & ~ORPHAN_FROM_POOL);
	bool from_pool = page_private(page) & ORPHAN_FROM_POOL, failed = has_failed(page), kept;
	u64 bytes = PAGE_SIZE << compound_order(page);

	set_page_private(page, 0);
	limits_uncharge(session, bytes);
	session_put(session);
	spin_lock(&pool->lock);
	pool->orphaned -= bytes;
	kept = take_back(pool, page, bytes, from_pool, failed);
	spin_unlock(&pool->lock);
	send_back(pool, page, kept, failed);
}

static void reap(struct work_struct *work)
{
	struct pool *pool = container_of(to_delayed_work(work), struct pool, reap);
	struct folio *folio, *next;
	LIST_HEAD(orphans);
	bool more;

	spin_lock(&pool->lock);
	list_splice_init(&pool->orphans, &orphans);
	spin_unlock(&pool->lock);
	list_for_each_entry_safe(folio, next, &orphans, lru) {
		if (folio_ref_count(folio) == 1) {
			list_del(&folio->lru);
			end_orphan(pool, &folio->page);
		}
		cond_resched();
	}
	spin_lock(&pool->lock);
	list_splice(&orphans, &pool->orphans);
	more = !list_empty(&pool->orphans);
	spin_unlock(&pool->lock);
	if (more)
		queue_delayed_work(works, &pool->reap, HZ);
}

/* ---- size ---- */

/* Allocates one page for the pool, if it is still short of its target. 1: there is more to do. */
static int grow_by_one(struct pool *pool)
{
	struct page *page;
	bool wanted;

	spin_lock(&pool->lock);
	wanted = pool->held < pool->target;
	pool->held += wanted;
	spin_unlock(&pool->lock);
	if (!wanted)
		return 0;
	page = from_system(pool->node, HUGE_ORDER, true, false);
	spin_lock(&pool->lock);
	if (page) {
		list_add(&page_folio(page)->lru, &pool->clean);
		pool->free++;
	} else {
		pool->held--;
		pool->failed += PMD_SIZE;
	}
	spin_unlock(&pool->lock);
	cond_resched();
	return page ? 1 : -ENOMEM;
}

static void shrink(struct pool *pool)
{
	struct page *page;
	bool in_hands;

	for (;;) {
		spin_lock(&pool->lock);
		page = NULL;
		in_hands = false;
		if (pool->held > pool->target) {
			/* Dirty ones first: they are worth less. */
			page = first(&pool->dirty);
			pool->n_dirty -= !!page;
			if (!page)
				page = first(&pool->clean);
			in_hands = !page && pool->free;
		}
		if (page) {
			list_del(&page_folio(page)->lru);
			pool->free--;
			pool->held--;
		}
		spin_unlock(&pool->lock);
		if (!page && !in_hands)
			return;
		if (!page)
			flush_work(&pool->scrub);	/* it has the last free one */
		else if (!has_failed(page))
			put_page(page);
		cond_resched();
	}
}

struct filler {
	struct work_struct work;
	struct completion done;
	struct pool *pool;
	bool *stop;
};

static void fill(struct work_struct *work)
{
	struct filler *filler = container_of(work, struct filler, work);

	while (!READ_ONCE(*filler->stop) && grow_by_one(filler->pool) > 0)
		;
	complete(&filler->done);
}

/*
 * Grows the pools of these nodes towards their targets, all at once, on their own CPUs. -EINTR: a fatal signal came; it
 * can take minutes, and killable sleep is also what the kernel doesn't take for a hang.
 */
static int grow(const nodemask_t *nodes)
{
	struct filler *fillers;
	bool stop = false;
	int node, i, n = 0;

	fillers = kvcalloc(nodes_weight(*nodes) * FILLERS_PER_NODE, sizeof(*fillers), GFP_KERNEL);
	if (!fillers)
		return -ENOMEM;
	for_each_node_mask(node, *nodes) {
		for (i = 0; i < FILLERS_PER_NODE && pools[node]->target > pools[node]->held; i++, n++) {
			fillers[n].pool = pools[node];
			fillers[n].stop = &stop;
			init_completion(&fillers[n].done);
			INIT_WORK(&fillers[n].work, fill);
			queue_work_node(node, works, &fillers[n].work);
		}
	}
	for (i = 0; i < n; i++)
		if (wait_for_completion_killable(&fillers[i].done))
			WRITE_ONCE(stop, true);
	for (i = 0; i < n; i++)
		flush_work(&fillers[i].work);
	kvfree(fillers);
	return stop ? -EINTR : 0;
}

/* What could not be had isn't waited for: pages that come back later stay with the system. */
static unsigned long settle(struct pool *pool)
{
	unsigned long held;

	spin_lock(&pool->lock);
	if (pool->held < pool->target)
		pool->target = pool->held;
	held = pool->held;
	spin_unlock(&pool->lock);
	return held;
}

s64 pool_resize(int node, u64 bytes)
{
	int ret = has_normal_memory(node);
	nodemask_t one = NODE_MASK_NONE;
	unsigned long held;
	struct pool *pool;
	bool short_of_it;

	if (ret)
		return ret;
	if (bytes >> PMD_SHIFT > node_present_pages(node) >> HUGE_ORDER)
		return -ENOMEM;
	pool = pools[node];
	node_set(node, one);
	spin_lock(&pool->lock);
	pool->target = bytes >> PMD_SHIFT;
	short_of_it = pool->held < pool->target;
	spin_unlock(&pool->lock);
	if (short_of_it)
		ret = grow(&one);
	shrink(pool);
	held = settle(pool);
	trace_offstage_reserve(node, bytes, (u64)held << PMD_SHIFT);
	return ret ?: (s64)held << PMD_SHIFT;
}

void pool_counts(int node, struct pool_counts *counts)
{
	struct pool *pool = pools[node];

	memset(counts, 0, sizeof(*counts));
	if (!pool)
		return;
	spin_lock(&pool->lock);
	counts->reserved = (u64)pool->held << PMD_SHIFT;
	counts->free = (u64)pool->free << PMD_SHIFT;
	counts->in_use = pool->in_use;
	counts->orphaned = pool->orphaned;
	counts->scrubbing = (u64)pool->n_dirty << PMD_SHIFT;
	counts->failed = pool->failed;
	spin_unlock(&pool->lock);
}

/* ---- filling at load ---- */

/* One entry of the parameter, "0:64G" or "all:80%", into targets. */
static int parse_reserve(char *entry)
{
	char *amount = entry, *end;
	int only, node;
	bool percent;
	u64 value;

	entry = strsep(&amount, ":");
	if (!amount)
		return -EINVAL;
	if (strcmp(entry, "all") == 0)
		only = NUMA_NO_NODE;
	else if (kstrtoint(entry, 10, &only) || only < 0 || only >= MAX_NUMNODES)
		return -EINVAL;
	else if (has_normal_memory(only))
		return -ENODEV;
	value = memparse(amount, &end);
	percent = *end == '%';
	if (end == amount || end[percent] || (percent && value > 100))
		return -EINVAL;
	for_each_node_state(node, N_NORMAL_MEMORY) {
		u64 present = (u64)node_present_pages(node) << PAGE_SHIFT;

		if (only == NUMA_NO_NODE || only == node)
			pools[node]->target =
				min(percent ? div_u64(present, 100) * value : value, present) >> PMD_SHIFT;
	}
	return 0;
}

int pools_fill(const char *reserve)
{
	char *copy, *rest, *entry;
	unsigned long wanted, held;
	int node, ret;

	if (!reserve || !*reserve)
		return 0;
	copy = kstrdup(reserve, GFP_KERNEL);
	if (!copy)
		return -ENOMEM;
	rest = copy;
	while ((entry = strsep(&rest, ",")))
		if (*entry && parse_reserve(entry))
			pr_warn("offstage: reserve=%s: an entry isn't NODE:BYTES, NODE:PERCENT%% or all:…, for a node with normal memory; it is left out\n",
				reserve);
	kfree(copy);
	ret = grow(&node_states[N_NORMAL_MEMORY]);
	for_each_node_state(node, N_NORMAL_MEMORY) {
		wanted = pools[node]->target;
		held = settle(pools[node]);
		if (held < wanted)
			pr_info("offstage: node %d: %lu MiB of %lu MiB could be reserved\n", node,
				held << (PMD_SHIFT - 20), wanted << (PMD_SHIFT - 20));
	}
	return ret;
}

/* For every node that could be: memory may come online later, as CXL memory does. */
int pools_init(void)
{
	int node;

	works = alloc_workqueue("offstage", WQ_UNBOUND, 0);
	if (!works)
		return -ENOMEM;
	for_each_node(node) {
		struct pool *pool = kzalloc(sizeof(*pool), GFP_KERNEL);

		if (!pool) {
			pools_exit();
			return -ENOMEM;
		}
		pool->node = node;
		spin_lock_init(&pool->lock);
		INIT_LIST_HEAD(&pool->clean);
		INIT_LIST_HEAD(&pool->dirty);
		INIT_LIST_HEAD(&pool->orphans);
		INIT_WORK(&pool->scrub, scrub);
		INIT_DELAYED_WORK(&pool->reap, reap);
		pools[node] = pool;
	}
	return 0;
}

/* No buffer is left, so everything that a pool holds is free, or an orphan, which stays with who has pinned it. */
void pools_exit(void)
{
	struct page *page;
	int node;

	for (node = 0; node < MAX_NUMNODES; node++) {
		struct pool *pool = pools[node];

		if (!pool)
			continue;
		cancel_delayed_work_sync(&pool->reap);
		cancel_work_sync(&pool->scrub);
		pool->target = 0;
		shrink(pool);
		while ((page = first(&pool->orphans))) {
			list_del(&page_folio(page)->lru);
			end_orphan(pool, page);
		}
		kfree(pool);
		pools[node] = NULL;
	}
	destroy_workqueue(works);
}
