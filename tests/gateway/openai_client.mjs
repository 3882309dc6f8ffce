// SPDX-License-Identifier: Apache-2.0
// The `openai` client, unmodified, against the gateway whose address is in the arguments.
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';

const [, , folder, baseURL, expectedFile] = process.argv;
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
    for (let i = 0; i < 100; i++) {
      const page = await (await fetch(root + '/metrics')).text();
      if (/vllm:num_requests_running\{[^}]*\} 0\n/.test(page)) return;
      await new Promise((done) => setTimeout(done, 50));
    }
    assert.fail('the aborted request goes on');
  },
};

let failed = 0;
for (const [name, test] of Object.entries(tests)) {
  try {
    await test();
    console.log(`ok ${name}`);
  } catch (e) {
    failed++;
    console.log(`FAIL ${name}: ${e.stack}`);
  }
}
process.exit(failed ? 1 : 0);
