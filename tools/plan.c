/* SPDX-License-Identifier: MIT */
/*
 * offstage plan: how much host memory a model needs, before anything is allocated. The sizes follow from what
 * offstage.h promises: state of 4 bytes for the master and two moments; one slot for each subgroup, gradients in and
 * parameters out (in place where both have elements of one size); padding only to pages and cache lines.
 */
#include <string.h>
#include "command.h"

static void help(void)
{
	puts("usage: offstage plan --params N [OPTIONS]\n\n"
	     "  --params N            parameters of the model, as 7e9\n"
	     "  --param-dtype TYPE    of the parameters on the device: bf16 (default), f16 or f32\n"
	     "  --grad-dtype TYPE     of the gradients: as the parameters by default (--grads is the same)\n"
	     "  --moments TYPE        of exp_avg and exp_avg_sq: f32 (default) or bf16\n"
	     "  --accumulate          sum micro-batches on the host, in fp32\n"
	     "  --world N             processes on this machine that share the state (ZeRO-1); default 1\n"
	     "  --json                the same numbers as JSON\n\n"
	     "Exit status 1: this machine hasn't that much memory available.");
}

struct plan {
	uint64_t params, world;
	uint32_t param, grad, moments;
	bool accumulate, json, grad_given;
};

/* Bytes for one parameter. */
static uint64_t state_per_param(const struct plan *p)
{
	return 4 + 2 * dtype_size(p->moments);
}

static uint64_t slot_per_param(const struct plan *p)
{
	uint64_t grad = p->accumulate ? 4 : dtype_size(p->grad), param = dtype_size(p->param);

	return grad == param ? grad : grad + param;
}

static void gib(const char *name, uint64_t bytes, const char *what)
{
	printf("%-12s%10.2f GiB  %s\n", name, (double)bytes / (1u << 30), what);
}

static int report(const struct plan *p, const struct offstage_info *info)
{
	/* Each process has its share, rounded up. */
	uint64_t share = (p->params + p->world - 1) / p->world;
	uint64_t state = share * state_per_param(p) * p->world, slots = share * slot_per_param(p) * p->world;
	uint64_t need = state + slots, have = info->memory_available;
	char text[96];
	struct json j;

	if (p->json) {
		if (!json_open(&j, "-"))
			return STATUS_FAILED;
		json_integer(&j, "params", p->params);
		json_integer(&j, "state_bytes", state);
		json_integer(&j, "slot_bytes", slots);
		json_integer(&j, "bytes", need);
		json_integer(&j, "bytes_per_process", need / p->world);
		json_integer(&j, "link_bytes_per_step", p->params * (dtype_size(p->grad) + dtype_size(p->param)));
		json_integer(&j, "memory_available", have);
		if (info->memlock_limit == UINT64_MAX)
			json_null(&j, "memlock_limit");
		else
			json_integer(&j, "memlock_limit", info->memlock_limit);
		return json_close(&j, "standard output") ? need > have : STATUS_FAILED;
	}
	snprintf(text, sizeof(text), "%llu bytes per parameter: master f32, two moments %s",
		 (unsigned long long)state_per_param(p), dtype_name(p->moments));
	gib("state", state, text);
	snprintf(text, sizeof(text), "%llu bytes per parameter: gradients %s%s, parameters %s%s",
		 (unsigned long long)slot_per_param(p), p->accumulate ? "summed in f32 from " : "", dtype_name(p->grad),
		 dtype_name(p->param), slot_per_param(p) == dtype_size(p->param) ? ", in place" : "");
	gib("slots", slots, text);
	snprintf(text, sizeof(text), "locked host memory%s", p->world > 1 ? ", of all processes together" : "");
	gib("sum", need, text);
	if (p->accumulate)
		puts("and some MiB in each process where micro-batches land before they are added");
	gib("available", have, info->memory_limit);
	gib("link", p->params * (dtype_size(p->grad) + dtype_size(p->param)), "in each step, both directions together");
	if (info->memlock_limit < need / p->world)
		printf("locked memory is limited to %llu KiB: raise it with ulimit -l, LimitMEMLOCK= or docker --ulimit memlock=-1\n",
		       (unsigned long long)info->memlock_limit >> 10);
	if (need > have) {
		printf("doesn't fit: %.2f GiB are missing\n", (double)(need - have) / (1u << 30));
		return STATUS_FAILED;
	}
	puts("fits");
	return 0;
}

int command_plan(int argc, char **argv)
{
	struct plan p = { .world = 1, .param = OFFSTAGE_BF16, .moments = OFFSTAGE_F32 };
	struct arguments a = { .argc = argc, .argv = argv, .at = 1 };
	struct offstage_info info = { .size = sizeof(info) };
	struct offstage *ctx;
	int status;

	while (arguments_next(&a)) {
		bool ok = true;

		if (arguments_is(&a, "--help")) {
			help();
			return 0;
		} else if (arguments_is(&a, "--params")) {
			ok = parse_count(arguments_value(&a), &p.params);
		} else if (arguments_is(&a, "--param-dtype")) {
			ok = parse_dtype(arguments_value(&a), &p.param);
		} else if (arguments_is(&a, "--grad-dtype") || arguments_is(&a, "--grads")) {
			ok = parse_dtype(arguments_value(&a), &p.grad);
			p.grad_given = true;
		} else if (arguments_is(&a, "--moments")) {
			ok = parse_dtype(arguments_value(&a), &p.moments) && p.moments != OFFSTAGE_F16;
		} else if (arguments_is(&a, "--world")) {
			ok = parse_count(arguments_value(&a), &p.world) && p.world && p.world <= 65536;
		} else if (strcmp(a.name, "--accumulate") == 0) {
			p.accumulate = true;
		} else if (strcmp(a.name, "--json") == 0) {
			p.json = true;
		} else {
			return usage_error("plan", "'%s' isn't an option", a.name);
		}
		if (!ok)
			return usage_error("plan", "the value of '%s' can't be used", a.name);
	}
	if (!p.params)
		return usage_error("plan", "--params is needed");
	if (!p.grad_given)
		p.grad = p.param;
	if (offstage_open(NULL, &ctx))
		return library_failed();
	status = offstage_info(ctx, &info) ? library_failed() : report(&p, &info);
	offstage_close(ctx);
	return status;
}
