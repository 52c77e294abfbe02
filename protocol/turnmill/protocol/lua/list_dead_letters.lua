-- Lists dead letters without moving their bodies: newest first.
--
-- KEYS   1 dead letters
-- ARGV   the newest id that counts ('+': all), most letters, most bytes of each value
-- Returns  for each letter its id, its fields (names and values, long values cut), and the whole size of its body
local letters = {}
for _, entry in ipairs(redis.call('XREVRANGE', KEYS[1], ARGV[1], '-', 'COUNT', ARGV[2])) do
  local fields, size = entry[2], 0
  for i = 1, #fields, 2 do
    if fields[i] == 'd' then size = #fields[i + 1] end
    fields[i + 1] = string.sub(fields[i + 1], 1, ARGV[3])
  end
  letters[#letters + 1] = { entry[1], fields, size }
end
return letters
