/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many tokens of prompts a step may have. Who decodes waits for the whole step, and who comes
 * for one or two of them: on an instance that computes 200 prompt tokens a second, a step with the
 * 512 that it could take would hold everybody up for seconds. So prompts are cut where a step takes
 * about step_ns, at the speed that steps with prompts have had. That is begun with few tokens and
 * at most doubled at a time: what a step cannot take is not found out by waiting for it.
 *
 * Not below LEAST tokens, however slow they are: below that most instances spend their time on
 * reading weights, and prompts would only take longer. A step takes about as long as it decodes and
 * LEAST tokens more, then.
 */
#include "scheduler/sched_private.h"

#define LEAST 64
#define MOST 1e9

void pace_init(struct sched_model *model)
{
    model->pace = LEAST;
}

/*
 * A step that was quicker than it might have been shows that more would fit; a slow one with fewer
 * tokens than LEAST shows nothing. Down half way: one step may be slow by chance.
 */
void pace_learn(struct sched_model *model, uint32_t tokens, double ns)
{
    double target = (double)model->config.step_ns, fit = tokens * target / ns;

    if (fit > model->pace)
        model->pace = MIN(MIN(fit, 2 * model->pace), MOST);
    else if (ns > target && tokens > LEAST)
        model->pace = MAX((model->pace + fit) / 2, LEAST);
}

uint32_t pace_prompts(const struct sched_model *model, uint32_t others, bool newcomers)
{
    if (!model->config.step_ns)
        return UINT32_MAX;
    double left = MAX(model->pace - others, LEAST);
    return (uint32_t)(newcomers ? left + LEAST : left);
}
