/* SPDX-License-Identifier: MIT */
/* Dynamic loss scale, by the rules of torch.amp.GradScaler: plain arithmetic on the caller's struct. */
#include <offstage.h>

void offstage_scaler_init(struct offstage_scaler *scaler)
{
	*scaler = (struct offstage_scaler){ .scale = 65536, .growth_factor = 2, .backoff_factor = 0.5,
					    .growth_interval = 2000 };
}

void offstage_scaler_update(struct offstage_scaler *scaler, int nonfinite)
{
	if (nonfinite) {
		scaler->scale *= scaler->backoff_factor;
		scaler->good_steps = 0;
		return;
	}
	if (++scaler->good_steps < scaler->growth_interval)
		return;
	scaler->good_steps = 0;
	/* As GradScaler: a scale that would no longer be finite in fp32 stays. */
	if (scaler->scale * scaler->growth_factor <= 3.4028234663852886e38)
		scaler->scale *= scaler->growth_factor;
}
