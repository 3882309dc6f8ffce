// SPDX-License-Identifier: Apache-2.0
// Tool calls as the unmodified `openai` client sees them: whole, streamed, and run by its helper.
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';

const [, , folder, baseURL] = process.argv;
const OpenAI = createRequire(folder + '/')('openai');
const client = new OpenAI({ baseURL, apiKey: 'x', maxRetries: 0 });
const messages = [{ role: 'user', content: 'Who are you?' }];
const tools = [{ type: 'function', function: { name: 'get_weather', parameters: {
  type: 'object', properties: { city: { type: 'string' }, days: { type: 'integer' } } } } }];
const want = { city: 'Paris \u2603', days: 3 };

for (const model of ['hermes', 'xml']) {
  const whole = await client.chat.completions.create({ model, messages, tools, temperature: 0 });
  const call = whole.choices[0].message.tool_calls[0];
  assert.deepEqual(JSON.parse(call.function.arguments), want);
  assert.equal(whole.choices[0].finish_reason, 'tool_calls');

  const runner = client.chat.completions.stream({ model, messages, tools, temperature: 0 });
  const names = [];
  runner.on('tool_calls.function.arguments.done', (e) => names.push(e.name));
  const final = await runner.finalChatCompletion();
  const message = final.choices[0].message;
  assert.equal(message.content, 'One moment.');
  assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), want);
  assert.deepEqual(names, ['get_weather']);

  // The answer goes back with its calls and a result: the template takes them.
  const next = await client.chat.completions.create({ model, temperature: 0, max_tokens: 4, messages: [
    ...messages, whole.choices[0].message,
    { role: 'tool', tool_call_id: call.id, content: '{"temp": 21}' }], tools });
  assert.equal(next.choices[0].finish_reason, 'length');
}
console.log('ok');
