// SPDX-License-Identifier: GPL-2.0
/*
 * Limits: what one open file, one user, and all users together may have in buffers. 0: no limit. They can be changed at
 * any time; what is over a lowered one stays and may not grow.
 */
#include <linux/atomic.h>
#include <linux/cred.h>
#include <linux/slab.h>
#include <linux/user_namespace.h>
#include "offstage.h"

u64 limit_file, limit_user = LIMIT_DEFAULT, limit_node, limit_all = LIMIT_DEFAULT;

/* A user's account, shared by the sessions of that user. */
struct account {
	struct list_head link;
	kuid_t uid;
	unsigned int sessions;
	u64 used;
};

static LIST_HEAD(accounts);
static DEFINE_SPINLOCK(lock);	/* guards accounts, their fields, and used_all; sessions' used is changed under it */
static u64 used_all;

/* The uids of a namespace that a user made are that user's: else each of them had a limit of its own. Root's aren't. */
static kuid_t account_owner(void)
{
	struct user_namespace *ns;
	kuid_t uid = current_uid();

	for (ns = current_user_ns(); ns->parent; ns = ns->parent)
		if (!uid_eq(ns->owner, GLOBAL_ROOT_UID))
			uid = ns->owner;
	return uid;
}

struct session *session_create(void)
{
	struct session *session = kzalloc(sizeof(*session), GFP_KERNEL_ACCOUNT);
	struct account *fresh = kzalloc(sizeof(*fresh), GFP_KERNEL_ACCOUNT), *account;
	kuid_t uid = account_owner();

	if (!session || !fresh) {
		kfree(session);
		kfree(fresh);
		return NULL;
	}
	kref_init(&session->ref);
	spin_lock(&lock);
	list_for_each_entry(account, &accounts, link)
		if (uid_eq(account->uid, uid))
			goto found;
	account = fresh;
	fresh = NULL;
	account->uid = uid;
	list_add(&account->link, &accounts);
found:
	account->sessions++;
	session->user = account;
	spin_unlock(&lock);
	kfree(fresh);
	return session;
}

static void session_free(struct kref *ref)
{
	struct session *session = container_of(ref, struct session, ref);
	struct account *account = session->user;

	spin_lock(&lock);
	if (--account->sessions)
		account = NULL;
	else
		list_del(&account->link);
	spin_unlock(&lock);
	kfree(account);
	kfree(session);
}

void session_put(struct session *session)
{
	kref_put(&session->ref, session_free);
}

static bool over(u64 used, u64 bytes, u64 limit)
{
	return limit && (bytes > limit || used > limit - bytes);
}

int limits_charge(struct session *session, u64 bytes, u32 *limit)
{
	spin_lock(&lock);
	if (over(session->used, bytes, READ_ONCE(limit_file)))
		*limit = OFFSTAGE_IOC_LIMIT_FILE;
	else if (over(session->user->used, bytes, READ_ONCE(limit_user)))
		*limit = OFFSTAGE_IOC_LIMIT_USER;
	else if (over(used_all, bytes, READ_ONCE(limit_all)))
		*limit = OFFSTAGE_IOC_LIMIT_ALL;
	else
		*limit = OFFSTAGE_IOC_LIMIT_NONE;
	if (*limit == OFFSTAGE_IOC_LIMIT_NONE) {
		session->used += bytes;
		session->user->used += bytes;
		used_all += bytes;
	}
	spin_unlock(&lock);
	return *limit == OFFSTAGE_IOC_LIMIT_NONE ? 0 : -EDQUOT;
}

void limits_uncharge(struct session *session, u64 bytes)
{
	spin_lock(&lock);
	session->used -= bytes;
	session->user->used -= bytes;
	used_all -= bytes;
	spin_unlock(&lock);
}

void limits_used(struct session *session, u64 *file, u64 *user, u64 *all)
{
	spin_lock(&lock);
	*file = session->used;
	*user = session->user->used;
	*all = used_all;
	spin_unlock(&lock);
}
