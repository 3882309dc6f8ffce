// SPDX-License-Identifier: Apache-2.0
// The `openai` client, unmodified, against the gateway whose address is in the arguments.
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';

const [, , folder, baseURL, expectedFile, ...only] = process.argv;
const require = createRequire(folder + '/');
const OpenAI = require('openai');
const cases = require(expectedFile).cases;
const client = new OpenAI({ baseURL, apiKey: 'good-key', maxRetries: 0 });
const model = 'ember-tiny';
const question = [{ role: 'user', content: 'Who are you?' }];
const answer = cases[0].greedy_text;
const story = 'Once upon a time there was a king who had';

const tests = {
  async version() {
    assert.match(require(folder + '/node_modules/openai/package.json').version, /^6\./);
  },

  async models() {
    const ids = [];
    for await (const m of client.models.list()) ids.push(m.id);
    assert.deepEqual(ids, [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async chat() {
    const r = await client.chat.completions.create({ model, messages: question, temperature: 0 });
    assert.equal(r.choices[0].message.content, answer);
    assert.equal(r.choices[0].finish_reason, 'stop');
    assert.equal(r.usage.total_tokens, r.usage.prompt_tokens + r.usage.completion_tokens);
    assert.match(r._request_id, /^[0-9a-f]+$/);
  },

  async chatStream() {
    const stream = await client.chat.completions.create({
      model, messages: question, temperature: 0, stream: true,
      stream_options: { include_usage: true } });
    let text = '', usage = null, reason = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? '';
      reason = chunk.choices[0]?.finish_reason ?? reason;
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, answer);
    assert.equal(reason, 'stop');
    assert.equal(usage.completion_tokens, cases[0].greedy_ids.length);
  },

  async chatStreamHelper() {
    const runner = client.chat.completions.stream({ model, messages: question, temperature: 0 });
    assert.equal(await runner.finalContent(), answer);
  },

  async completion() {
    for (const c of cases.slice(0, 5)) {
      const r = await client.completions.create({
        model, prompt: c.prompt, temperature: 0, max_tokens: c.greedy_ids.length });
      assert.equal(r.choices[0].text, c.greedy_text);
    }
  },

  async completionStream() {
    const stream = await client.completions.create({
      model, prompt: cases[0].prompt, temperature: 0, max_tokens: 100, stream: true });
    let text = '';
    for await (const chunk of stream) text += chunk.choices[0].text;
    assert.equal(text, answer);
  },

  async logprobs() {
    const r = await client.completions.create({
      model, prompt: story, temperature: 0, max_tokens: 5, logprobs: 2 });
    assert.equal(r.choices[0].logprobs.tokens.join(''), r.choices[0].text);
    const c = await client.chat.completions.create({
      model, messages: question, temperature: 0, max_completion_tokens: 5, logprobs: true,
      top_logprobs: 2 });
    const content = c.choices[0].logprobs.content;
    assert.equal(content.map((e) => e.token).join(''), c.choices[0].message.content);
    assert.equal(content[0].top_logprobs.length, 2);
  },

  async severalChoices() {
    const r = await client.completions.create({
      model, prompt: story, n: 3, temperature: 1, seed: 11, max_tokens: 12 });
    assert.equal(new Set(r.choices.map((c) => c.text)).size, 3);
    const stream = await client.completions.create({
      model, prompt: story, n: 3, temperature: 1, seed: 11, max_tokens: 12, stream: true });
    const texts = ['', '', ''];
    for await (const chunk of stream)
      for (const c of chunk.choices) texts[c.index] += c.text;
    assert.deepEqual(texts, r.choices.map((c) => c.text));
  },

  async chatChoices() {
    const body = { model, messages: question, n: 2, temperature: 1, seed: 5, max_tokens: 8 };
    const r = await client.chat.completions.create(body);
    assert.deepEqual(r.choices.map((c) => c.index), [0, 1]);
    const texts = ['', ''], reasons = [null, null];
    for await (const chunk of await client.chat.completions.create({ ...body, stream: true }))
      for (const c of chunk.choices) {
        texts[c.index] += c.delta.content ?? '';
        reasons[c.index] = c.finish_reason ?? reasons[c.index];
      }
    assert.deepEqual(texts, r.choices.map((c) => c.message.content));
    assert.deepEqual(reasons, r.choices.map((c) => c.finish_reason));
  },

  async logprobStreams() {
    const body = { model, messages: question, temperature: 0, max_tokens: 6, logprobs: true,
                   top_logprobs: 2 };
    const whole = (await client.chat.completions.create(body)).choices[0].logprobs.content;
    const pieces = [];
    for await (const chunk of await client.chat.completions.create({ ...body, stream: true }))
      pieces.push(...(chunk.choices[0]?.logprobs?.content ?? []));
    assert.deepEqual(pieces, whole);
    const c = { model, prompt: story, temperature: 0, max_tokens: 6, logprobs: 2 };
    const all = (await client.completions.create(c)).choices[0].logprobs;
    const tokens = [];
    for await (const chunk of await client.completions.create({ ...c, stream: true }))
      tokens.push(...(chunk.choices[0].logprobs?.tokens ?? []));
    assert.deepEqual(tokens, all.tokens);
  },

  async stopStreams() {
    const body = { model, prompt: story, temperature: 0, max_tokens: 30, stop: [' the'] };
    const whole = (await client.completions.create(body)).choices[0];
    let text = '', reason = null;
    for await (const chunk of await client.completions.create({ ...body, stream: true })) {
      text += chunk.choices[0].text;
      reason = chunk.choices[0].finish_reason ?? reason;
    }
    assert.equal(text, whole.text);
    assert.equal(reason, 'stop');
  },

  async severalPrompts() {
    const prompts = cases.slice(0, 3).map((c) => c.prompt);
    const r = await client.completions.create({ model, prompt: prompts, temperature: 0,
                                                max_tokens: 100 });
    assert.deepEqual(r.choices.map((c) => c.text), cases.slice(0, 3).map((c) => c.greedy_text));
  },

  async stop() {
    const r = await client.completions.create({
      model, prompt: story, temperature: 0, max_tokens: 30, stop: [' the', 'never seen'] });
    assert.equal(r.choices[0].finish_reason, 'stop');
    assert.ok(!r.choices[0].text.includes(' the'));
  },

  async errors() {
    const messages = question;
    await assert.rejects(client.chat.completions.create({ model: 'nope', messages }),
      (e) => e instanceof OpenAI.NotFoundError && e.code === 'model_not_found');
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: -2 }),
      (e) => e instanceof OpenAI.BadRequestError && e.param === 'temperature');
    const stranger = new OpenAI({ baseURL, apiKey: 'bad-key', maxRetries: 0 });
    await assert.rejects(stranger.models.list(),
      (e) => e instanceof OpenAI.AuthenticationError && e.code === 'invalid_api_key');
    await assert.rejects(client.completions.create({ model, prompt: 'a '.repeat(5000) }),
      (e) => e instanceof OpenAI.BadRequestError && e.code === 'context_length_exceeded');
  },

  async tooLarge() {
    await assert.rejects(client.completions.create({ model, prompt: 'a'.repeat(3 << 20) }),
      (e) => e instanceof OpenAI.APIError && e.status === 413 && e.code === 'request_too_large');
  },

  async errorInMidStream() {
    const root = baseURL.replace('/v1', ''), headers = { Authorization: 'Bearer good-key' };
    assert.equal((await fetch(root + '/sleep', { method: 'POST', headers })).status, 200);
    try { // heartbeats open the stream, the queue's time-out ends it
      const stream = await client.completions.create({ model, prompt: story, stream: true });
      await assert.rejects((async () => { for await (const _ of stream); })(),
        (e) => e instanceof OpenAI.APIError && e.code === 'timeout');
      await assert.rejects(client.completions.create({ model, prompt: story }),
        (e) => e instanceof OpenAI.InternalServerError && e.status === 503 &&
               Number(e.headers.get('retry-after')) >= 1);
    } finally {
      assert.equal((await fetch(root + '/wake_up', { method: 'POST', headers })).status, 200);
    }
  },

  async retries() { // its own: 429 is tried again after Retry-After
    const root = baseURL.replace('/v1', ''), headers = { Authorization: 'Bearer good-key' };
    const post = async (path) => assert.equal(
      (await fetch(root + path, { method: 'POST', headers })).status, 200);
    await post('/sleep'); // the queue is full for as long as nobody works on it
    let refusals = 0;
    const crowd = Array.from({ length: 12 }, (_, i) => client.completions.create(
      { model, prompt: `${story} ${i}`, n: 16, max_tokens: 30, ignore_eos: true },
      { maxRetries: 0 }).then(() => 'done', (e) => (refusals++, e)));
    while (!refusals) await new Promise((done) => setTimeout(done, 10));
    await post('/wake_up');
    const ends = await Promise.all(crowd);
    const refused = ends.filter((e) => e !== 'done');
    assert.ok(refused.length > 0, 'nobody is refused');
    for (const e of refused)
      assert.ok(e instanceof OpenAI.RateLimitError && e.code === 'queue_full' &&
                Number(e.headers.get('retry-after')) >= 1, `${e}`);
    const patient = Array.from({ length: 12 }, (_, i) => client.completions.create(
      { model, prompt: `${story} ${i}`, n: 4, max_tokens: 8 }, { maxRetries: 20 }));
    for (const r of await Promise.all(patient)) assert.equal(r.choices.length, 4);
  },

  async abort() {
    const stream = await client.completions.create({
      model, prompt: story, temperature: 0, max_tokens: 1900, stream: true, ignore_eos: true });
    let n = 0;
    for await (const chunk of stream) {
      assert.ok(chunk.choices.length);
      if (++n === 5) stream.controller.abort();
    }
    assert.ok(n < 1000, `${n} chunks after the abort`);
    const root = baseURL.replace('/v1', '');
    for (let i = 0; i < 1200; i++) {
      const page = await (await fetch(root + '/metrics')).text();
      if (/vllm:num_requests_running\{[^}]*\} 0\n/.test(page)) return;
      await new Promise((done) => setTimeout(done, 50));
    }
    assert.fail('the aborted request goes on');
  },
};

let failed = 0;
for (const [name, test] of Object.entries(tests)) {
  if (only.length && !only.includes(name)) continue;
  try {
    await test();
    console.log(`ok ${name}`);
  } catch (e) {
    failed++;
    console.log(`FAIL ${name}: ${e.stack}`);
  }
}
process.exit(failed ? 1 : 0);
